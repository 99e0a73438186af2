"""What must not be waited for longer than so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

Answer = TypeVar("Answer")


def within(seconds: float, call: Callable[[], Answer], who: str = "the store") -> Answer:
    """What `call` gives, or a TimeoutError: a store whose keeper is stopped never answers, and a rank that died while it was connected
    to is waited for as long as gloo likes, whatever their time-outs."""
    box: list[Any] = []

    def run() -> None:
        try:
            box.append((call(), None))
        except Exception as error:
            box.append((None, error))

    thread = threading.Thread(target=run, name="moeyard-within", daemon=True)
    thread.start()
    thread.join(seconds)
    if not box:
        raise TimeoutError(f"{who} did not answer within {seconds:g} s")
    answer, error = box[0]
    if error is not None:
        raise error
    return answer  # type: ignore[no-any-return]
