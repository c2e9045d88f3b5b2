"""The dispatcher: names, order, declining, messages."""

import pytest
from jaxtrain_kernels.dispatch import dispatch


def takes(x):
    return ("takes", x)


def declines(x):
    raise NotImplementedError("needs a Hopper GPU")


def also_declines(x):
    raise NotImplementedError("head dim 96 is not 64, 128 or 256")


def test_auto_takes_the_first_that_does_not_decline():
    backends = {"declines": declines, "takes": takes, "never_asked": None}
    assert dispatch("op", "auto", backends, 3) == ("takes", 3)


def test_a_named_backend_never_falls_back():
    backends = {"takes": takes, "declines": declines}
    with pytest.raises(NotImplementedError, match="op: impl='declines' declines: needs a Hopper"):
        dispatch("op", "declines", backends, 3)


def test_all_reasons_in_one_message():
    backends = {"a": declines, "b": also_declines}
    with pytest.raises(NotImplementedError) as caught:
        dispatch("op", "auto", backends, 3)
    for part in ("op", "a: needs a Hopper GPU", "b: head dim 96"):
        assert part in str(caught.value)


def test_unknown_name_lists_the_allowed():
    with pytest.raises(ValueError, match="'fast'; allowed: auto, takes"):
        dispatch("op", "fast", {"takes": takes}, 3)


def test_other_errors_pass_through():
    def broken(x):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        dispatch("op", "auto", {"broken": broken, "takes": takes}, 3)
