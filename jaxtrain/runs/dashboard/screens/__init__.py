"""The five screens: (look, width, height) -> a Frame of exactly that size."""
