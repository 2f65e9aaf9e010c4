"""`ServedModel`: a model with its engine in a child process."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Unpack

from afterglow.api.load import (
    apply_disk_cache,
    build_engine_settings,
    build_engine_spec,
    read_chat_template,
    resolve_draft,
)
from afterglow.api.model import Model
from afterglow.api.options import LoadOptions, check_options
from afterglow.engine.host.build import EngineSpec
from afterglow.engine.host.lifecycle import ProcessLifecycle
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import AfterglowError
from afterglow.media.policy import INLINE_ONLY, MediaPolicy


class ServedSettings:
    """Settings of a served model: arguments of `afterglow.load`, checked."""

    def __init__(
        self,
        *,
        media_policy: MediaPolicy = INLINE_ONLY,
        engine: EngineSettings | None = None,
        **options: Unpack[LoadOptions],
    ) -> None:
        self.options = check_options(LoadOptions, options)
        self.media_policy = media_policy
        self.chat_template = read_chat_template(self.options["chat_template"])
        self.engine = build_engine_settings(engine, self.options | {"disk_cache": False}, options, label="")

    def build_spec(self, path: Path) -> EngineSpec:
        """Return the spec from which the child process builds the engine."""
        engine = apply_disk_cache(self.engine, str(path), self.options["disk_cache"])
        return build_engine_spec(path, self.options, engine, draft=resolve_draft(self.options["draft"], fetch=False))


class ServedModel(Model):
    """A model with its engine in a child process. A crash of the engine fails only the requests in flight."""

    def __init__(self, name: str, path: Path, settings: ServedSettings | None = None) -> None:
        self.served = served = settings or ServedSettings()
        super().__init__(
            ProcessLifecycle(served.build_spec(path)),
            name,
            chat_template=served.chat_template,
            media_policy=served.media_policy,
            strip_media=served.options["strip_media"],
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
