"""Chooses the options of a model that nobody set, so that it fits into the free memory. Pure: it loads nothing.

Order of preference; a later preference never takes memory from an earlier one:

1. A conversation of 32,768 tokens, or of the trained length if that is shorter, shared by four sequences.
2. All layers on the GPU, if there is one: with an f16 KV cache, or else with q8_0. Then the experts of a
   mixture-of-experts (MoE) model stay in RAM, as few as possible. Then fewer layers are on the GPU.
3. An f16 KV cache. q8_0 if the 32,768 tokens do not fit otherwise; then a shorter conversation.
4. A longer conversation: up to the trained length, at most 131,072 tokens.
5. Cells of their own for each sequence. Until then all sequences share the cells (`kv_unified`).
6. The RAM prefix cache: a quarter of the free memory, at most 2 GiB; less, rather than giving up one of 1 to 3.

In RAM, 4 and 5 use at most a quarter of what the weights leave free: llama.cpp writes to all of it when it starts, and
other programs need memory, too. A given option is never changed. What cannot fit raises `OutOfMemory` with the nearest
setting that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, cast

from afterglow.api.options import LoadOptions, build_context_settings, build_model_settings
from afterglow.errors import OutOfMemory
from afterglow.llama.gguf.footprint import Footprint, ModelFacts
from afterglow.llama.library.devices import MachineMemory
from afterglow.llama.model import ModelSettings
from afterglow.llama.settings import ContextSettings

MIB, GIB = 1024**2, 1024**3
WANTED_CONTEXT_TOKENS = 32_768
MAX_CONTEXT_TOKENS = 131_072
MIN_CONTEXT_TOKENS = 1024
UNKNOWN_TRAINED_CONTEXT_TOKENS = 4096
WANTED_SEQUENCES = 4
CONTEXT_STEP_TOKENS = 1024
GPU_BATCH_ROWS = 16_384  # large decodes, because a GPU is idle between two of them
GPU_UBATCH_ROWS = 2048  # computed at once: with fewer rows, a GPU spends more of its time on reading the weights
PROCESS_BYTES = 128 * MIB  # Python and libraries of an engine process; measured 76 to 104 MB
MAX_RAM_RESERVE_BYTES = 2 * GIB  # for the system
RAM_RESERVE_FRACTION = 1 / 8  # of the free RAM: for other programs and the page cache
GPU_RESERVE_FRACTION = 1 / 16  # of the free memory of a GPU: for drivers and graphs
MAX_RAM_CACHE_BYTES = 2 * GIB
RAM_CACHE_FRACTION, MIN_RAM_CACHE_FRACTION = 1 / 4, 1 / 16  # of the free RAM
PLANNED_OPTIONS = (
    "context", "sequences", "kv_unified", "cache_type_k", "cache_type_v", "gpu_layers", "cpu_moe_layers", "batch",
    "ubatch", "ram_cache_bytes",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Companions:
    """Memory beside the model: a draft model or MTP heads, a projector, adapters, snapshots of recurrent states."""

    draft: ModelFacts | None = None
    uses_mtp: bool = False
    projector_bytes: int = 0
    adapter_bytes: int = 0
    recurrent_snapshots: int = 0


@dataclass(frozen=True, slots=True)
class FitLine:
    """One line of a plan: a setting or a use of memory, the reason for it, and its bytes."""

    name: str
    value: str
    reason: str
    ram_bytes: int = 0
    gpu_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FitPlan:
    """Options with which a model fits into the memory of a machine, and where its memory goes."""

    options: Mapping[str, Any]
    """Values of the options that fit chooses: the given ones, and the chosen ones for those that are not set."""
    chosen: frozenset[str]
    """Names of the options that were chosen."""
    lines: tuple[FitLine, ...]
    ram_bytes: int
    gpu_bytes: int
    memory: MachineMemory

    def describe(self) -> dict[str, Any]:
        """Return the plan as values of JSON."""
        memory = {"ram_bytes": self.memory.ram_bytes, "gpu_bytes": list(self.memory.gpu_bytes)}
        needed = {"ram_bytes": self.ram_bytes, "gpu_bytes": self.gpu_bytes}
        lines = [asdict(line) for line in self.lines]
        return {"options": dict(self.options), "chosen": sorted(self.chosen), "lines": lines, "needed": needed,
                "free": memory}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Values of the options that are chosen, except the RAM cache, which gets the rest."""

    context: int
    sequences: int
    kv_unified: bool
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    gpu_layers: int = 0
    cpu_moe_layers: int = 0
    batch: int | None = None
    ubatch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Memory of a candidate by device, without the RAM prefix cache."""

    ram: Footprint
    gpu: Footprint
    draft_bytes: int  # draft model or MTP heads, with the model
    beside_ram: int  # draft, projector and adapters
    beside_gpu: int

    @property
    def ram_bytes(self) -> int:
        return self.ram.total_bytes + self.beside_ram + PROCESS_BYTES

    @property
    def gpu_bytes(self) -> int:
        return self.gpu.total_bytes + self.beside_gpu


def plan_fit(
    facts: ModelFacts, options: LoadOptions, memory: MachineMemory, companions: Companions | None = None
) -> FitPlan:
    """Choose the options that are None. Raises `OutOfMemory` if nothing fits.

    >>> from afterglow.api.options import check_options
    >>> from afterglow.llama.gguf.header import read_header
    >>> options = check_options(LoadOptions, {"sequences": 1})
    >>> plan = plan_fit(ModelFacts([read_header(path)]), options, MachineMemory(ram_bytes=8 * 1024**3))
    >>> plan.options["cache_type_k"], plan.ram_bytes < 8 * 1024**3
    ('f16', True)
    """
    planner = _Planner(facts, options, memory, companions or Companions())
    candidate = planner.choose()
    if candidate is None:
        raise planner.build_error()
    return planner.build_plan(candidate)


def compute_usable_gpu_memory(free_bytes: Sequence[int], settings: ModelSettings) -> int:
    """Return the GPU memory that a model can use, from the free bytes of each GPU and how they share the model.

    >>> compute_usable_gpu_memory([8, 4], ModelSettings())
    12
    >>> compute_usable_gpu_memory([8, 4], ModelSettings(main_gpu=1, split_mode="none"))
    4
    >>> compute_usable_gpu_memory([8, 4], ModelSettings(tensor_split=(1, 1)))  # the smaller one is full first
    8
    """
    if settings.split_mode == "none":
        return sum(free_bytes[settings.main_gpu : settings.main_gpu + 1])
    shares = list(zip(free_bytes, settings.tensor_split, strict=False))
    if not any(share for _, share in shares):
        return sum(free_bytes)
    total = sum(share for _, share in shares)
    return int(min(free * total / share for free, share in shares if share))


class _Planner:
    """Searches the candidates in the order of preference."""

    def __init__(self, facts: ModelFacts, options: LoadOptions, memory: MachineMemory, companions: Companions) -> None:
        self._facts, self._options, self._memory, self._companions = facts, options, memory, companions
        self._given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        self._gpu_free = compute_usable_gpu_memory(memory.gpu_bytes, build_model_settings(options))
        self._has_gpu = self._gpu_free > 0
        # What the user asks for may use everything; what is chosen here leaves a reserve.
        is_given = "context" in self._given
        ram_reserve = 0 if is_given else min(MAX_RAM_RESERVE_BYTES, int(memory.ram_bytes * RAM_RESERVE_FRACTION))
        self._ram_limit = memory.ram_bytes - ram_reserve
        self._gpu_limit = self._gpu_free - (0 if is_given else int(self._gpu_free * GPU_RESERVE_FRACTION))
        self._ram_cache_bytes: int = self._given.get(
            "ram_cache_bytes", min(MAX_RAM_CACHE_BYTES, int(memory.ram_bytes * RAM_CACHE_FRACTION))
        )
        self._min_ram_cache_bytes: int = self._given.get(
            "ram_cache_bytes",
            0 if is_given else min(MAX_RAM_CACHE_BYTES, int(memory.ram_bytes * MIN_RAM_CACHE_FRACTION)),
        )
        self.longest = min(facts.hyperparameters.trained_context or UNKNOWN_TRAINED_CONTEXT_TOKENS, MAX_CONTEXT_TOKENS)

    # --- search

    def choose(self) -> Candidate | None:
        """Return the best candidate that fits, or None."""
        wanted = self._given.get("sequences", WANTED_SEQUENCES)
        for context in self._iter_first_contexts():
            for sequences in dict.fromkeys((wanted, self._given.get("sequences", 1))):
                first = self._place(
                    self._change(Candidate(context=context, sequences=sequences, kv_unified=sequences > 1))
                )
                if first is not None:
                    return self._enlarge_ubatch(self._separate_sequences(self._lengthen(first)))
        return None

    def _iter_first_contexts(self) -> Iterator[int]:
        """Yield the lengths to try, the wanted one first."""
        if "context" in self._given:
            yield self._given["context"]
            return
        shortest, context = min(self.longest, MIN_CONTEXT_TOKENS), min(self.longest, WANTED_CONTEXT_TOKENS)
        yield context
        while context > shortest:
            context = max(shortest, (context - 1) // CONTEXT_STEP_TOKENS * CONTEXT_STEP_TOKENS)
            yield context

    def _place(self, candidate: Candidate) -> Candidate | None:
        """Return the candidate with the best cache types and devices with which it fits."""
        typed = [self._change(candidate, cache_type_k=keys, cache_type_v=values) for keys, values in self._list_types()]
        if not self._has_gpu:
            return next(filter(self._fits, typed), None)
        for place in (self._put_all_on_gpu, self._put_experts_in_ram, self._put_layers_in_ram):
            for placed in map(place, typed):
                if placed is not None and self._fits(placed):
                    return placed
        return None

    def _put_all_on_gpu(self, candidate: Candidate) -> Candidate | None:
        return self._change(candidate, gpu_layers=-1)

    def _put_experts_in_ram(self, candidate: Candidate) -> Candidate | None:
        """Keep the experts of as few layers as possible in RAM."""
        if not self._facts.moe_layers:
            return None
        all_on_gpu, last = self._change(candidate, gpu_layers=-1), self._facts.moe_layers[-1] + 1
        count = find_first(last + 1, lambda n: self._fits_gpu(self._change(all_on_gpu, cpu_moe_layers=n)))
        return None if count is None else self._change(all_on_gpu, cpu_moe_layers=count)

    def _put_layers_in_ram(self, candidate: Candidate) -> Candidate | None:
        """Keep as few layers as possible in RAM."""
        last = len(self._facts.layers) + 1  # the output counts as a layer
        count = find_first(last + 1, lambda n: self._fits_gpu(self._change(candidate, gpu_layers=last - n)))
        return None if count is None else self._change(candidate, gpu_layers=last - count)

    def _lengthen(self, candidate: Candidate) -> Candidate:
        """Return the candidate with the longest context that fits comfortably, if nothing had to give way before."""
        shortest = candidate.context
        if "context" in self._given or not self._is_unrestricted(candidate) or shortest >= self.longest:
            return candidate
        lengths = [
            self.longest,
            *range((self.longest - 1) // CONTEXT_STEP_TOKENS * CONTEXT_STEP_TOKENS, shortest, -CONTEXT_STEP_TOKENS),
        ]
        index = find_first(len(lengths), lambda n: self._fits_comfortably(self._change(candidate, context=lengths[n])))
        return candidate if index is None else self._change(candidate, context=lengths[index])

    def _separate_sequences(self, candidate: Candidate) -> Candidate:
        """Give each sequence cells of its own, if they fit."""
        separate = self._change(candidate, kv_unified=False)
        if {"context", "sequences"} <= self._given.keys():
            return separate if self._fits(separate) else candidate
        return separate if self._is_unrestricted(candidate) and self._fits_comfortably(separate) else candidate

    def _enlarge_ubatch(self, candidate: Candidate) -> Candidate:
        """Let a GPU compute more rows at once, if the buffers for them fit."""
        if not self._has_gpu or not candidate.gpu_layers or not self._is_unrestricted(candidate):
            return candidate
        larger = self._change(candidate, ubatch=min(GPU_UBATCH_ROWS, self._build_settings(candidate).batch))
        return larger if self._fits_comfortably(larger) else candidate

    def _is_unrestricted(self, candidate: Candidate) -> bool:
        """Whether neither the cache types nor the devices of a candidate are a compromise."""
        layers = -1 if self._has_gpu else 0
        wanted = {"cache_type_k": "f16", "cache_type_v": "f16", "gpu_layers": layers, "cpu_moe_layers": 0}
        return all(name in self._given or getattr(candidate, name) == value for name, value in wanted.items())

    def _change(self, candidate: Candidate, **changes: Any) -> Candidate:
        """Return a changed candidate, in which the given options have their values."""
        given = {field.name: self._given[field.name] for field in fields(Candidate) if field.name in self._given}
        changed = replace(candidate, **{**changes, **given})
        if changed.sequences == 1 and "kv_unified" not in given:
            changed = replace(changed, kv_unified=False)
        # With MTP heads every row has a hidden state in memory.
        if changed.gpu_layers and self._has_gpu and "batch" not in given and not self._companions.uses_mtp:
            changed = replace(changed, batch=max(GPU_BATCH_ROWS, changed.ubatch or 0))
        return changed

    def _list_types(self) -> list[tuple[str, str]]:
        """Return the cache types to try: f16, then q8_0 if the width of a head is a multiple of its block."""
        widths = self._facts.hyperparameters.get_head_widths()
        can_quantize = all(width % 32 == 0 for width in widths) and self._options["flash_attention"] is not False
        types = [("f16", "f16"), *([("q8_0", "q8_0")] if can_quantize else [])]
        keys, values = self._given.get("cache_type_k"), self._given.get("cache_type_v")
        return list(dict.fromkeys((keys or chosen[0], values or chosen[1]) for chosen in types))

    # --- memory

    def _measure(self, candidate: Candidate) -> Use:
        """Return the memory of a candidate."""
        settings = self._build_settings(candidate)
        layers = candidate.gpu_layers if self._has_gpu else 0
        ram, gpu = self._facts.estimate_devices(
            settings, gpu_layers=layers, cpu_moe_layers=candidate.cpu_moe_layers if layers else 0
        )
        gpu = replace(gpu, compute_bytes=gpu.compute_bytes * max(1, len(self._memory.gpu_bytes)))
        draft = self._measure_draft(settings)
        beside = draft + self._companions.projector_bytes + self._companions.adapter_bytes
        on_ram, on_gpu = (0, beside) if layers else (beside, 0)
        return Use(ram=ram, gpu=gpu, draft_bytes=draft, beside_ram=on_ram, beside_gpu=on_gpu)

    def _build_settings(self, candidate: Candidate) -> ContextSettings:
        options = cast(LoadOptions, {**self._options, **asdict(candidate), "threads": 1})
        return add_snapshots(build_context_settings(options), self._companions.recurrent_snapshots)

    def _measure_draft(self, settings: ContextSettings) -> int:
        """Return the memory of a draft model with the same context, or of the context of MTP heads."""
        settings = replace(settings, recurrent_snapshots=0)
        if self._companions.draft is not None:
            return self._companions.draft.estimate(settings).total_bytes
        if not self._companions.uses_mtp:
            return 0
        parameters = self._facts.hyperparameters
        heads = parameters.get_number("nextn_predict_layers")
        largest = max(parameters.count_cache_bytes(settings), default=0)
        return heads * largest + parameters.estimate_compute_bytes(settings)

    def _count_free_ram(self, use: Use) -> int:
        """Return the RAM that a candidate leaves to the RAM prefix cache; negative if it needs more than there is."""
        return self._ram_limit - use.ram_bytes - (use.gpu_bytes if self._memory.shares_ram else 0)

    def _fits_gpu(self, candidate: Candidate) -> bool:
        return self._measure(candidate).gpu_bytes <= self._gpu_limit

    def _fits(self, candidate: Candidate) -> bool:
        use = self._measure(candidate)
        return use.gpu_bytes <= self._gpu_limit and self._count_free_ram(use) >= self._min_ram_cache_bytes

    def _fits_comfortably(self, candidate: Candidate) -> bool:
        """Whether a candidate leaves the RAM prefix cache its full size, and uses a quarter of the free RAM itself."""
        use = self._measure(candidate)
        left = self._count_free_ram(use)
        return self._fits(candidate) and left >= max(self._ram_cache_bytes, 3 * use.ram.context_bytes)

    # --- results

    def build_error(self) -> OutOfMemory:
        """Return the error for a model that does not fit, with the nearest setting that fits."""
        context, sequences = (
            self._given.get("context", min(self.longest, MIN_CONTEXT_TOKENS)),
            self._given.get("sequences", 1),
        )
        keys, values = self._list_types()[-1]
        smallest = Candidate(
            context=context, sequences=sequences, kv_unified=sequences > 1, cache_type_k=keys, cache_type_v=values
        )
        use = self._measure(self._change(smallest))
        advice = self._find_advice() or "use a smaller model or quantization, or free memory"
        if use.gpu_bytes > self._gpu_limit:
            return OutOfMemory(use.gpu_bytes + self._gpu_free - self._gpu_limit, self._gpu_free, advice)
        gpu_free = 0 if "gpu_layers" in self._given or self._memory.shares_ram else self._gpu_free
        needed = use.ram_bytes + self._min_ram_cache_bytes + self._memory.ram_bytes - self._ram_limit
        return OutOfMemory(needed, self._memory.ram_bytes + gpu_free, advice)

    def _find_advice(self) -> str | None:
        """Return the longest context that fits, or the first given option without which the model fits and a value."""
        if (context := self._find_longest_context()) is not None:
            return f"context={context} fits"
        for name in ("sequences", "kv_unified", "gpu_layers", "cpu_moe_layers", "ram_cache_bytes"):
            if name not in self._given:
                continue
            planner = self._replace_option(name, None)
            if (candidate := planner.choose()) is not None:
                return f"{name}={planner.build_plan(candidate).options[name]} fits"
        return None

    def _find_longest_context(self) -> int | None:
        """Return the longest context that fits if it is given: such a plan leaves no reserve."""
        longest = self._given.get("context", self.longest)
        lengths = range(longest // CONTEXT_STEP_TOKENS * CONTEXT_STEP_TOKENS, 0, -CONTEXT_STEP_TOKENS)
        index = find_first(len(lengths), lambda n: self._replace_option("context", lengths[n]).choose() is not None)
        return None if index is None else lengths[index]

    def _replace_option(self, name: str, value: object) -> _Planner:
        options = cast(LoadOptions, {**self._options, name: value})
        return _Planner(self._facts, options, self._memory, self._companions)

    def build_plan(self, candidate: Candidate) -> FitPlan:
        """Return the plan of a candidate: the rest of the RAM is for the prefix cache, up to its limit."""
        use, settings = self._measure(candidate), self._build_settings(candidate)
        ram_cache: int = self._given.get(
            "ram_cache_bytes", max(0, min(self._ram_cache_bytes, self._count_free_ram(use)))
        )
        options = {**asdict(candidate), "batch": settings.batch, "ubatch": min(settings.ubatch, settings.batch)}
        return FitPlan(
            options={**options, "ram_cache_bytes": ram_cache},
            chosen=frozenset(PLANNED_OPTIONS) - self._given.keys(),
            lines=tuple(self._iter_lines(candidate, settings, use, ram_cache)),
            ram_bytes=use.ram_bytes + ram_cache,
            gpu_bytes=use.gpu_bytes,
            memory=self._memory,
        )

    def _iter_lines(
        self, candidate: Candidate, settings: ContextSettings, use: Use, ram_cache: int
    ) -> Iterator[FitLine]:
        layers, moe_layers = len(self._facts.layers), len(self._facts.moe_layers)
        ram, gpu = use.ram, use.gpu
        yield FitLine("weights", f"{layers} layers", "the tensors of the file", ram.weight_bytes, gpu.weight_bytes)
        if self._has_gpu:
            is_all = candidate.gpu_layers < 0 or candidate.gpu_layers > layers
            reason = self._explain("gpu_layers", "all fit" if is_all else "as many as fit")
            yield FitLine("layers on the GPU", "all" if is_all else f"{candidate.gpu_layers} of {layers + 1}", reason)
        if self._has_gpu and moe_layers:
            reason = self._explain("cpu_moe_layers", "as few as possible")
            yield FitLine("experts in RAM", f"{candidate.cpu_moe_layers} of {moe_layers} layers", reason)
        yield FitLine("context", f"{candidate.context:,} tokens", self._explain_context(candidate))
        yield FitLine("sequences", *self._describe_sequences(candidate))
        if ram.kv_cache_bytes or gpu.kv_cache_bytes:
            types = " and ".join(dict.fromkeys((candidate.cache_type_k, candidate.cache_type_v)))
            value, reason = f"{types}, {settings.cells:,} cells", self._explain_types(candidate)
            yield FitLine("KV cache", value, reason, ram.kv_cache_bytes, gpu.kv_cache_bytes)
        if ram.recurrent_bytes or gpu.recurrent_bytes:
            states = settings.sequences * (1 + settings.recurrent_snapshots)
            reason = "one per sequence and snapshot"
            yield FitLine("recurrent states", f"{states}", reason, ram.recurrent_bytes, gpu.recurrent_bytes)
        value, reason = f"batch {settings.batch:,}, ubatch {settings.ubatch:,}", "masks, activations and logits"
        yield FitLine("compute buffers", value, reason, ram.compute_bytes + ram.output_bytes, gpu.compute_bytes)
        if use.draft_bytes:
            name = "MTP heads" if self._companions.draft is None else "draft model"
            yield FitLine(name, "", "with the same context", *self._place_bytes(use.draft_bytes, use))
        if projector := self._companions.projector_bytes:
            yield FitLine("projector", "", "encodes images and audio", *self._place_bytes(projector, use))
        if adapters := self._companions.adapter_bytes:
            count = len(self._options["adapters"])
            yield FitLine("adapters", f"{count}", "LoRA adapters for requests", *self._place_bytes(adapters, use))
        is_full = ram_cache == self._ram_cache_bytes
        reason = "a quarter of the free RAM, at most 2 GiB" if is_full else "what the other lines leave"
        yield FitLine("RAM prefix cache", "limit", self._explain("ram_cache_bytes", reason), ram_cache)
        yield FitLine("process", "", "Python and libraries of the engine", PROCESS_BYTES)

    @staticmethod
    def _place_bytes(nbytes: int, use: Use) -> tuple[int, int]:
        return (nbytes, 0) if use.beside_ram else (0, nbytes)

    def _explain(self, name: str, reason: str) -> str:
        return "given" if name in self._given else reason

    def _explain_context(self, candidate: Candidate) -> str:
        trained, context = self._facts.hyperparameters.trained_context, candidate.context
        suffix = f"the model was trained for {trained:,}"
        if "context" in self._given:
            return f"given; {suffix}" if 0 < trained < context else "given"
        if context == trained:
            return "the trained length"
        return f"the longest that is chosen; {suffix}" if context == MAX_CONTEXT_TOKENS else f"what fits; {suffix}"

    def _describe_sequences(self, candidate: Candidate) -> tuple[str, str]:
        """Return the number of sequences with their layout, and the reason."""
        if candidate.sequences == 1:
            return "1", self._explain("sequences", "more do not fit")
        layout = "sharing all cells" if candidate.kv_unified else "with cells of their own"
        fit = "would not fit" if candidate.kv_unified else "fit"
        reason = self._explain("kv_unified", f"{candidate.sequences} times {candidate.context:,} cells {fit}")
        return f"{candidate.sequences} {layout}", reason

    def _explain_types(self, candidate: Candidate) -> str:
        types = {name: getattr(candidate, name) for name in ("cache_type_k", "cache_type_v")}
        if any(value == "q8_0" for name, value in types.items() if name not in self._given):
            return "f16 would not fit"
        return (
            "full precision" if set(types.values()) == {"f16"} and not types.keys() <= self._given.keys() else "given"
        )


def find_first(count: int, holds: Callable[[int], bool]) -> int | None:
    """Return the first number from 0 to `count` - 1 for which `holds` is true, if it stays true after that.

    >>> find_first(10, lambda number: number >= 7), find_first(3, lambda number: False)
    (7, None)
    """
    if count <= 0 or not holds(count - 1):
        return None
    low, high = 0, count - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def add_snapshots(settings: ContextSettings, count: int) -> ContextSettings:
    """Return settings with snapshots of recurrent states. Unified memory has none, since a decode may lose them."""
    return replace(settings, recurrent_snapshots=0 if settings.kv_unified else count)
