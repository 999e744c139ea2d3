"""What lives when a process is ready is not looked at again; what dies later is still collected."""

from __future__ import annotations

import gc
import weakref

from paceline.garbage import set_aside_what_lives


class Knot:
    """Refers to itself, so that only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_later_collections_look_at_later_objects_alone() -> None:
    early = Knot()
    try:
        set_aside_what_lives()
        assert not any(each is early for each in gc.get_objects())
        late = Knot()
        seen = weakref.ref(late)
        del late
        gc.collect()
        assert seen() is None
    finally:
        gc.unfreeze()
