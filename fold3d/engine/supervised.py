"""Supervised: what runs on one rank fails on all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fold3d.engine.pipeline import Pipeline
from fold3d.errors import ConfigError, Fold3dError, RankError
from fold3d.faults.failure import is_communication_error


class Supervised:
    """Tells the other ranks of failures, and stops for theirs. A rank that is alone goes on after a failure."""

    _pipeline: Pipeline | None
    _failure: str | None

    @contextlib.contextmanager
    def supervise(self, doing: str) -> Iterator[None]:
        """Tells the other ranks when the body raises, so that they stop too; all ranks run it.

        Args:
            doing: completes "failed in ...".
        Raises: RankError when another rank failed or cannot be reached, else what the body raised. fold3d's own errors
            pass untold: they are raised on every rank by themselves.
        """
        before = self._pipeline  # None: the body builds it
        with before.progress.during(doing) if before is not None else contextlib.nullcontext():
            try:
                yield
            except Fold3dError:
                raise
            except BaseException as error:
                pipeline = self._pipeline
                if pipeline is None or pipeline.is_alone:
                    raise  # ended, or not built (who waits for this rank in building sees it go), or nobody is there
                if self._failure is None:
                    self._failure = pipeline.fail(error)
                if isinstance(error, Exception) and is_communication_error(error):
                    raise RankError(self._failure) from error
                raise

    @contextlib.contextmanager
    def _failing_together(self, doing: str, *, meets: bool = True) -> Iterator[None]:
        assert self._pipeline is not None
        with self._pipeline.progress.during(doing, meets=meets):
            try:
                self._raise_failure()
                yield
            except RankError:
                raise
            except BaseException as error:
                if self._is_closed:  # nobody can be told any more
                    if not isinstance(error, Exception):
                        raise
                    raise _closed_in(doing) from error
                message = self._pipeline.fail(error)
                if not self._pipeline.is_alone:
                    self._failure = message
                if not isinstance(error, Exception):
                    raise
                # fold3d's own errors say all there is to say; of others the user wants to see where they come from.
                raise RankError(message) from None if isinstance(error, Fold3dError) else error
            else:
                if self._is_closed:
                    raise _closed_in(doing)

    @property
    def _is_closed(self) -> bool:
        return self._pipeline is None

    def _raise_failure(self) -> None:
        """Raises RankError when another rank has failed meanwhile."""
        assert self._pipeline is not None
        told = self._pipeline.failure()
        if told is not None:
            self._failure = self._pipeline.fail(RankError(told))
            raise RankError(told)


def _closed_in(doing: str) -> ConfigError:
    return ConfigError(f"the engine was closed in the middle of {doing}")
