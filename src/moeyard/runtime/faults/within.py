"""What must not be waited for longer than so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

Answer = TypeVar("Answer")


def within(seconds: float, call: Callable[[], Answer]) -> Answer:
    """What `call` gives, or a TimeoutError: a store whose keeper is stopped never answers, whatever its own time-out."""
    box: list[Any] = []

    def run() -> None:
        try:
            box.append((call(), None))
        except Exception as error:
            box.append((None, error))

    thread = threading.Thread(target=run, name="moeyard-verdict", daemon=True)
    thread.start()
    thread.join(seconds)
    if not box:
        raise TimeoutError(f"the store did not answer within {seconds:g} s")
    answer, error = box[0]
    if error is not None:
        raise error
    return answer  # type: ignore[no-any-return]
