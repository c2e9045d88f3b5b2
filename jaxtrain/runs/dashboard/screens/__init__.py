"""The five screens, each a tab of the dashboard."""
