"""What modules of the model that runs in this thread know of its call."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any


class Told(threading.local):
    """Modules of the model that runs in this thread that have been told something of its call."""

    modules: tuple[Any, ...] = ()

    def __contains__(self, module: Any) -> bool:
        return any(each is module for each in self.modules)

    @contextlib.contextmanager
    def within(self, *modules: Any) -> Iterator[None]:
        """Tells modules, and no others, within a block."""
        before, self.modules = self.modules, modules
        try:
            yield
        finally:
            self.modules = before
