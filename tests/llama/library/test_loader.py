"""An incompatible llama.cpp library is rejected with a reason before it is used."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import cffi
import pytest

from afterglow.errors import LibraryError
from afterglow.llama.library import compiled_declarations, loader
from afterglow.llama.library.declarations import BUILD, DECLARATIONS
from afterglow.llama.library.loader import MTP_NAMES, Library, check_machine, cpu, get_library, providers
from afterglow.llama.library.mtp_functions import MTP_DECLARATIONS

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.mark.native
def test_the_pinned_build_is_opened_from_its_package():
    library = get_library()
    assert library.location.provider.package == "xllamacpp"
    assert library.location.provider.build == BUILD == "b11549"
    assert library.supports_mtp


@pytest.mark.native
def test_the_environment_variable_takes_precedence_over_packages(monkeypatch):
    path = get_library().location.path
    monkeypatch.setenv(providers.LIBRARY_ENV_VAR, str(path))
    location = providers.find_library()
    assert location.path == path
    assert providers.LIBRARY_ENV_VAR in location.reason


def test_a_folder_in_the_environment_variable_is_searched_for_library_and_companions(monkeypatch, tmp_path):
    names = [
        "libllama-0a1b2c3d.so.0.7.0",
        "libmtmd-01234567.so",
        "libggml-base-01234567.so.0",
        "libggml-cuda.so",
        "x.txt",
    ]
    for name in names:
        (tmp_path / name).touch()
    monkeypatch.setenv(providers.LIBRARY_ENV_VAR, str(tmp_path))
    assert [path.name for path in providers.find_library().files] == [names[0], names[2], names[1]]


def test_the_error_names_a_missing_file_of_the_environment_variable(monkeypatch, tmp_path):
    monkeypatch.setenv(providers.LIBRARY_ENV_VAR, str(tmp_path / "libllama.so"))
    with pytest.raises(LibraryError, match=r"libllama\.so"):
        providers.find_library()


def test_gpu_packages_are_preferred_and_the_fallback_is_last():
    names = [provider.package for provider in providers.PROVIDERS]
    assert names.index("cyllama-cuda12") < names.index("cyllama-vulkan") < names.index("xllamacpp")
    assert names[-1] == "llama-cpp-py-sync"


def test_without_any_package_the_error_lists_them(monkeypatch):
    monkeypatch.setattr(providers, "PROVIDERS", (providers.Provider(package="not-there-at-all", build="b0"),))
    with pytest.raises(LibraryError, match="not-there-at-all"):
        providers.find_library()


def test_a_file_that_is_not_a_library_is_rejected(tmp_path):
    path = tmp_path / "libllama.so"
    path.write_bytes(b"not a library")
    location = providers.LibraryLocation(provider=providers.PROVIDERS[-1], files=(path,), reason="a test")
    with pytest.raises(LibraryError, match=r"libllama\.so"):
        Library(location)


def test_a_library_without_the_required_functions_is_rejected(tmp_path):
    unrelated = next(Path(sys.prefix).rglob("_blake3*.so"), None) or next(Path(sys.prefix).rglob("blake3*.so"))
    location = providers.LibraryLocation(provider=providers.PROVIDERS[-1], files=(unrelated,), reason="a test")
    with pytest.raises(LibraryError, match="no function llama_decode"):
        Library(location)


@pytest.mark.native
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("    size_t moe_cache_size;\n", ""), "168 bytes instead of 160"),
        (("    uint32_t n_seq_max;\n", "    uint32_t n_seq_max;\n    uint32_t inserted;\n"), "instead of"),
        (
            ("    enum ggml_type type_k;\n    enum ggml_type type_v;\n", "    size_t a;\n"),
            "has no field|instead of",
        ),
    ],
)
def test_a_library_with_different_structs_is_rejected_with_both_sizes(monkeypatch, change, reason):
    changed = cffi.FFI()
    changed.cdef(DECLARATIONS.replace(*change))
    changed.cdef(MTP_DECLARATIONS)
    monkeypatch.setattr(loader, "ffi", changed)
    with pytest.raises((LibraryError, AttributeError), match=reason):
        Library(get_library().location)


@pytest.mark.native
def test_a_library_with_different_defaults_is_rejected(monkeypatch):
    monkeypatch.setitem(loader.KNOWN_DEFAULTS["llama_context"], "n_ubatch", 256)
    with pytest.raises(LibraryError, match=r"n_ubatch = 512 instead of 256"):
        Library(get_library().location)


@pytest.mark.native
def test_an_unsupported_cpu_is_rejected_before_the_library_is_opened(monkeypatch):
    monkeypatch.setattr(cpu, "get_architecture", lambda: "x86_64")
    monkeypatch.setattr(cpu, "get_features", lambda: frozenset({"sse2", "avx"}))
    with pytest.raises(LibraryError, match=r"avx2, bmi2, f16c, fma.*AFTERGLOW_LIBLLAMA"):
        check_machine(get_library().location)


def test_an_old_glibc_is_rejected_before_the_library_is_opened(monkeypatch):
    monkeypatch.setattr(loader.platform, "libc_ver", lambda: ("glibc", "2.36"))
    location = providers.LibraryLocation(provider=providers.PROVIDERS[-1], files=(Path("x"),), reason="a test")
    with pytest.raises(LibraryError, match=r"glibc 2\.38.*glibc 2\.36"):
        check_machine(location)


def test_cpu_features_are_read_from_the_system(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nflags\t\t: fpu AVX2 fma\n")
    assert cpu._read_linux_features(path) == {"fpu", "avx2", "fma"}
    assert cpu._read_linux_features(tmp_path / "none") is None


@pytest.mark.native
def test_a_library_may_lack_mtp(monkeypatch):
    missing = {**MTP_NAMES, "llama_get_ctx_other": "_Z_not_exported"}
    monkeypatch.setattr(loader, "MTP_NAMES", missing)
    assert Library(get_library().location).supports_mtp is False


@pytest.mark.native
def test_the_log_of_llama_cpp_goes_to_logging(open_model, caplog):
    with caplog.at_level(logging.INFO, "afterglow.llama.cpp"):
        open_model("attention")
    assert any("loaded meta data" in record.message for record in caplog.records)


@pytest.mark.native
def test_a_program_without_logging_setup_prints_nothing():
    program = (
        "from afterglow.llama.model import LlamaModel\n"
        "from afterglow.testing import models\n"
        "LlamaModel.load(models.get_path('attention'))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == result.stderr == ""


def test_the_compiled_declarations_are_those_of_the_declarations(tmp_path):
    subprocess.run([sys.executable, SCRIPTS / "compile_declarations.py", tmp_path / "compiled.py"], check=True)
    assert (tmp_path / "compiled.py").read_text() == Path(compiled_declarations.__file__).read_text()


@pytest.mark.native
def test_an_abort_starts_no_debugger():
    get_library()
    assert os.environ["GGML_NO_BACKTRACE"] == "1"


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C preprocessor")
def test_the_declarations_generator_reads_a_header(tmp_path, monkeypatch):
    """Uses a small header; the real one comes with the source of the pinned package."""
    for folder in ("include", "ggml/include", "tools/mtmd"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "ggml/include/ggml-backend.h").write_text(
        "typedef struct ggml_backend_device * ggml_backend_dev_t;\nint ggml_unwanted(void);\n"
    )
    (tmp_path / "include/llama.h").write_text(
        "enum llama_kind { LLAMA_A = 1, LLAMA_B = 1 << 3 };\n#define OLD __attribute__((deprecated))\n"
        "OLD int llama_old(void);\nint llama_new(int a,\n   int b);\n"
    )
    (tmp_path / "tools/mtmd/mtmd.h").write_text("void mtmd_do(void);\n")
    script = tmp_path / "scripts" / "generate.py"
    script.parent.mkdir()
    script.write_text((SCRIPTS / "generate_declarations.py").read_text())
    (tmp_path / "src/afterglow/llama/library").mkdir(parents=True)
    subprocess.run([sys.executable, script, tmp_path, "b1"], check=True, capture_output=True)
    text = (tmp_path / "src/afterglow/llama/library/declarations.py").read_text()
    assert "int llama_new(int a, int b);" in text
    assert "LLAMA_B = 1 << 3," in text
    assert "llama_old" not in text
    assert "ggml_unwanted" not in text
    assert 'BUILD = "b1"' in text
