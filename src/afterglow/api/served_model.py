"""`ServedModel`: a model with its engine in a child process."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from afterglow.api.load import apply_disk_cache, build_engine_spec
from afterglow.api.model import Model
from afterglow.api.options import LoadOptions
from afterglow.engine.host.build import DraftSource, EngineSpec
from afterglow.engine.host.lifecycle import ProcessLifecycle
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import AfterglowError
from afterglow.media.policy import INLINE_ONLY, MediaPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSettings(LoadOptions):
    """Settings of a served model. They mean the same as the arguments of `afterglow.load`."""

    disk_cache: bool | None = None  # None: on, unless AFTERGLOW_DISK_CACHE is `off`
    chat_template: str | None = None  # None: the template of the model
    projector: Path | Literal[False] | None = None  # None: the only one next to the model file
    media_policy: MediaPolicy = INLINE_ONLY
    strip_media: bool = False  # drop unsupported media with a warning instead of an error
    draft: DraftSource | None = None  # "mtp", or the file of a draft model
    engine: EngineSettings = field(default_factory=EngineSettings)

    def build_spec(self, path: Path) -> EngineSpec:
        """Return the spec from which the child process builds the engine."""
        return build_engine_spec(
            path,
            self,
            apply_disk_cache(self.engine, str(path), self.disk_cache),
            draft=self.draft,
            projector=self.projector,
        )


class ServedModel(Model):
    """A model with its engine in a child process. A crash of the engine fails only the requests in flight."""

    def __init__(self, name: str, path: Path, settings: ServedSettings | None = None) -> None:
        self.served = served = settings or ServedSettings()
        super().__init__(
            ProcessLifecycle(served.build_spec(path)),
            name,
            chat_template=served.chat_template,
            media_policy=served.media_policy,
            strip_media=served.strip_media,
        )
        try:
            self.activate()
            if self.can_generate:
                self._warm_up()
        except BaseException:
            self.close()
            raise

    def _warm_up(self) -> None:
        """Do slow one-time work now, so that the first request does not wait for it."""
        _ = self.fingerprint, self.vocabulary.eog_tokens
        with contextlib.suppress(AfterglowError):  # requests report template errors
            self.plan_chat("Hello")

    @property
    def is_alive(self) -> bool:
        """Whether the engine runs."""
        return self.is_active

    @property
    def has_failed(self) -> bool:
        """Whether the engine could not be restarted."""
        return self.needs_restart

    def restart(self) -> None:
        """Start a new engine."""
        self._lifecycle.restart()

    def check_prompt_length(self, tokens: list[int]) -> None:
        """Raise `PromptTooLong` if a prompt does not fit."""
        self._check_length(tokens, self.context_length)
