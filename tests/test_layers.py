"""Imports point down: between the top-level packages, and between the modules inside each package."""

from __future__ import annotations

import ast
import collections
import functools
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "afterglow"
FILES = sorted(SOURCE.rglob("*.py"))

# Each list is an import order, lowest first. A line may name several units that do not depend on each other's order.
# A unit is a module or a package; the longest matching name counts, so `kvcache.disk` is not part of `kvcache`.
ORDERS = {
    "": """
        closeable database errors installation paths version
        media registry testing.models
        llama
        engine
        chat testing
        api
        testing.script
        agents server
        cluster
        cli
    """,
    "llama": """
        checks deep_call handle page_buffers parallel atomic_write sampling zero_pages
        library
        settings
        gguf
        vocabulary
        model
        batch kv_memory kv_layout lora projector top_logits
        device_logits
        candidates
        sampler
        state
        context
        trial
        gguf.probe_child kv_probe
    """,
    "engine": """
        types
        kvcache.budget kvcache.blocks kvcache.radix_tree kvcache.cost_model kvcache.eviction
        kvcache.checkpoints kvcache.last_logits kvcache.ram kvcache.sequence kvcache.tier
        kvcache.disk
        kvcache.objects
        kvcache
        sampling
        multimodal
        scheduling
        backends
        speculation
        verify
        slices
        engine
        pooling scoring
        inspect
        host
    """,
    "chat": """
        content
        template.capabilities
        messages
        template
        multimodal
        control_tokens
        prompt
        output
        sqlite_cache replay
        replay_disk summaries
        tools.tool tools.function_schema
        constraints
        tools
        chat
        truncation
        compaction
        miss_reasons
    """,
    "agents": """
        limits permissions
        events
        loop terminal_questions toolbox
        execution
        endpoints mcp_process remote roles store
        mcp_client sync_tools
        conversation
        resources
        run
        agent
        mcp_server
    """,
    "cluster": """
        host replica
        router application
        run
    """,
    "server": """
        errors settings logs sealing volatile
        priority
        metrics schema sse limits admission model_budget
        conversations
        model_bytes events
        history
        installed
        models
        held_models
        adapters state auth
        media explain large_json
        generation_requests
        generation
        openai.schema anthropic.errors anthropic.schema
        anthropic.conversion anthropic.formatting anthropic.diagnostics
        anthropic
        openai
        batches.lines
        batches.ordering batches.store
        batches.execution
        batches
        ollama retrieval llamacpp
        schema.admin schema.observe
        admin observe web
        app
        serve
    """,
}
RANKS = {
    package: {unit: rank for rank, line in enumerate(order.strip().splitlines()) for unit in line.split()}
    for package, order in ORDERS.items()
}
# Units of one line that must not import each other, although their order would allow it.
APART = [
    *({"media", "registry"}, {"registry", "llama"}, {"testing.models", "llama"}, {"testing.models", "registry"}),
    {"agents", "server"},
]
# `Finished` ends a request in the engine, and a run in `afterglow.agents`, whose events are public.
SHARED_TYPE_NAMES = {"Finished"}
# Optional dependencies are imported inside functions, so that afterglow works without them.
OPTIONAL = {"anyio", "httpx", "httpx2", "huggingface_hub", "mcp", "obstore", "ray"}
# Imported inside functions, because they take long to import and most starts of a command do not need them.
DEFERRED = {"PIL", "importlib", "rich.console", "rich.progress", "soundfile", "urllib.request"}
DEFERRED |= {"afterglow.cli.models", "afterglow.media.audio", "afterglow.media.images"}


@functools.cache
def parse(path: Path) -> ast.Module:
    """Syntax tree of a file."""
    return ast.parse(path.read_text())


def module_name(path: Path) -> str:
    """Dotted name below `afterglow`, e.g. `engine.kvcache.planner`."""
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path) for path in FILES}


@functools.cache
def list_imports(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Import statements of a file, those inside blocks included."""
    return [node for node in ast.walk(parse(path)) if isinstance(node, ast.Import | ast.ImportFrom)]


def imported_modules(path: Path) -> set[str]:
    """Modules of afterglow that a file imports, as dotted names below `afterglow`."""
    found = set()
    for node in list_imports(path):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "afterglow":
            base = node.module.removeprefix("afterglow").lstrip(".")
            for alias in node.names:
                name = f"{base}.{alias.name}".lstrip(".")
                found.add(name if name in MODULES else base)
        elif isinstance(node, ast.Import):
            found |= {a.name.removeprefix("afterglow.") for a in node.names if a.name.startswith("afterglow.")}
    return found - {""}


@functools.cache
def unit_of(module: str, package: str) -> str | None:
    """Longest unit of a package's order that contains the module; None if the module is not in the package."""
    if package and not module.startswith(f"{package}."):
        return None
    inner = module.removeprefix(f"{package}.") if package else module
    units = [unit for unit in RANKS[package] if inner == unit or inner.startswith(f"{unit}.")]
    assert units, f"{module} is in no unit of the order of `{package or 'afterglow'}`: add it to ORDERS"
    return max(units, key=len)


def find_upward_imports(path: Path) -> list[str]:
    """Imports of one file that break an order."""
    importer = module_name(path)
    if importer in ("__init__", *ORDERS):
        return []  # the public names come from everywhere
    problems = []
    for imported in imported_modules(path):
        for package, ranks in RANKS.items():
            own = unit_of(importer, package)
            other = None if imported in ORDERS else unit_of(imported, package)
            if own is None or other is None or own == other:
                continue
            if ranks[other] > ranks[own]:
                problems.append(f"{importer} imports {imported}, which is above it")
            if {own, other} in APART:
                problems.append(f"{importer} imports {imported}, which is independent of it")
    return problems


def find_misplaced_imports(path: Path) -> list[str]:
    """Relative imports and imports inside a block, which only the lazy import of the public names needs."""
    tree, problems = parse(path), []
    if module_name(path) in ("__init__", "agents"):
        return []
    for node in list_imports(path):
        where = f"{module_name(path)}, line {node.lineno}"
        if isinstance(node, ast.ImportFrom) and node.level:
            problems.append(f"{where}: relative import")
        root = (node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name
        if node not in tree.body and root.split(".")[0] not in OPTIONAL and root not in DEFERRED:
            problems.append(f"{where}: import inside a block")
    return problems


def find_readme_problems(package: Path) -> list[str]:
    """What is missing in the README.md of a package."""
    name, readme = package.relative_to(SOURCE), package / "README.md"
    if not readme.exists():
        return [f"{name} has no README.md"]
    text = readme.read_text()
    problems = [f"{name}/README.md has more than 40 lines"] if len(text.splitlines()) > 40 else []
    modules = [path.stem for path in package.glob("*.py") if path.stem != "__init__"]
    return problems + [f"{name}/README.md does not list {module}" for module in modules if module not in text]


def find_type_names(path: Path) -> list[str]:
    """Return the names of the classes and type aliases that a module defines."""
    return [
        node.name if isinstance(node, ast.ClassDef) else node.target.id
        for node in parse(path).body
        if isinstance(node, ast.ClassDef)
        or (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and ast.unparse(node.annotation) == "TypeAlias"
        )
    ]


def test_imports_point_down() -> None:
    assert [problem for path in FILES for problem in find_upward_imports(path)] == []


def test_imports_are_absolute_and_at_the_top() -> None:
    assert [problem for path in FILES for problem in find_misplaced_imports(path)] == []


def test_every_module_has_a_docstring() -> None:
    assert [module_name(path) for path in FILES if not ast.get_docstring(parse(path))] == []


def test_every_package_has_a_short_readme_that_lists_its_modules() -> None:
    packages = sorted({path.parent for path in FILES} - {SOURCE})
    assert [problem for package in packages for problem in find_readme_problems(package)] == []


def test_no_type_name_is_defined_twice() -> None:
    names = collections.Counter(name for path in FILES for name in find_type_names(path))
    assert [name for name, count in names.items() if count > 1 and name not in SHARED_TYPE_NAMES] == []
