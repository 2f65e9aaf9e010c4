"""LoRA adapters: loaded once per model, applied to its contexts with a scale."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any, Protocol

from afterglow.errors import InvalidArgument, InvalidModel, ModelNotFound
from afterglow.llama.gguf import probe
from afterglow.llama.gguf.fingerprint import compute_fingerprint
from afterglow.llama.handle import Handle
from afterglow.llama.library.loader import get_library
from afterglow.llama.model import LlamaModel


class AdapterUser(Protocol):
    """A context that applies adapters."""

    def remove_adapter(self, adapter: LoraAdapter) -> None: ...


class LoraAdapter(Handle):
    """A loaded LoRA adapter.

    >>> adapter = LoraAdapter.load(model, Path("style.gguf"))
    >>> context.set_adapters({adapter: 0.8})
    """

    def __init__(self, pointer: Any, model: LlamaModel, path: Path) -> None:
        super().__init__("adapter", pointer, get_library().symbols.llama_adapter_lora_free, parent=model)
        self.model = model
        self.path = path
        self.fingerprint = compute_fingerprint(path)
        self.invocation_tokens = self._read_invocation_tokens()
        self.users: weakref.WeakSet[AdapterUser] = weakref.WeakSet()

    @classmethod
    def load(cls, model: LlamaModel, path: Path, *, trust: bool = False) -> LoraAdapter:
        """Load an adapter for `model`. A new pair is first loaded in a child process, unless `trust` is set."""
        path, library = Path(path), get_library()
        if not path.is_file():
            raise ModelNotFound(str(path), "there is no such adapter file")
        if not trust:
            probe.ensure_safe(model.path, path)
        library.log_bridge.take_error("")
        pointer = library.symbols.llama_adapter_lora_init(model.pointer, str(path).encode())
        if pointer == library.ffi.NULL:
            reason = library.log_bridge.take_error("llama.cpp rejected this adapter and gave no reason")
            raise InvalidModel(str(path), f"it cannot be applied to {model.path.name}: {reason}")
        return cls(pointer, model, path)

    def _read_invocation_tokens(self) -> tuple[int, ...]:
        """Return the tokens from which on an activated adapter (aLoRA) is to be applied; empty for other adapters."""
        symbols = get_library().symbols
        count = symbols.llama_adapter_get_alora_n_invocation_tokens(self.pointer)
        tokens = symbols.llama_adapter_get_alora_invocation_tokens(self.pointer)
        return tuple(int(tokens[index]) & 0xFFFFFFFF for index in range(count))  # invalid ones match no token

    def get_pointer_for(self, model: LlamaModel) -> Any:
        """Return the native pointer; raise `InvalidArgument` if the adapter was loaded for another model."""
        if self.model is not model:
            raise InvalidArgument("adapters", f"{self.path.name} was loaded for another model")
        return self.pointer

    def close(self) -> None:
        """Free the adapter; contexts that still apply it continue without it."""
        for user in [] if self.closed else list(self.users):
            user.remove_adapter(self)
        super().close()
