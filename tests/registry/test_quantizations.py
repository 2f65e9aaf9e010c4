"""Files of repositories, with the names that are common on the hub, are grouped into models."""

from __future__ import annotations

import pytest

from afterglow.errors import DownloadFailed
from afterglow.registry.quantizations import (
    RepositoryFile,
    choose_mtp_head,
    choose_projector,
    find_variants,
    group_files,
)


def group(*paths):
    return group_files(RepositoryFile(path, 100 + len(path), None) for path in paths)


@pytest.mark.parametrize(
    ("path", "quantization"),
    [
        ("Qwen3-8B-Q4_K_M.gguf", "Q4_K_M"),
        ("qwen2.5-0.5b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("Model.Q8_0.gguf", "Q8_0"),
        ("UD-IQ2_XXS/model-UD-IQ2_XXS-00001-of-00001.gguf", "UD-IQ2_XXS"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("model-fp16.gguf", "F16"),
        ("BF16/model.gguf", "BF16"),
        ("plain.gguf", "plain"),
        ("Q4-is-not-at-the-Q8end.gguf", "Q4"),
    ],
)
def test_the_quantization_comes_from_the_name_or_the_folder(path, quantization):
    assert [variant.quantization for variant in group(path).variants] == [quantization]


def test_a_split_model_needs_all_shards():
    assert group("a-Q4_0-00001-of-00003.gguf", "a-Q4_0-00003-of-00003.gguf").variants == ()
    (variant,) = group(*(f"a-Q4_0-0000{number}-of-00003.gguf" for number in (2, 3, 1))).variants
    assert [file.path[7:12] for file in variant.files] == ["00001", "00002", "00003"]


def test_several_models_of_one_quantization_are_refused_with_their_files():
    contents = group("small-Q8_0.gguf", "large-Q8_0.gguf", "small-Q4_0.gguf")
    with pytest.raises(DownloadFailed, match=r"several models; name a file .*: .*large-Q8_0\.gguf"):
        find_variants(contents, "owner/repo", "Q8_0")
    assert len(find_variants(contents, "owner/repo", "q4_0")) == 1


def test_unquantized_files_are_chosen_only_without_others():
    assert [variant.quantization for variant in find_variants(group("a-F16.gguf", "a-Q8_0.gguf"), "", None)] == ["Q8_0"]
    assert [variant.quantization for variant in find_variants(group("a-F16.gguf"), "", None)] == ["F16"]


def test_companions_are_the_nearest_by_name_then_by_quantization():
    contents = group(
        "small-Q4_0.gguf",
        "large-Q4_0.gguf",
        "mmproj-small-F32.gguf",
        "mmproj-small-F16.gguf",
        "mmproj-large-BF16.gguf",
        "mtp-large-Q8_0.gguf",
        "mtp-large-Q4_0.gguf",
    )
    large, small = sorted(contents.variants, key=lambda variant: variant.stem)
    assert choose_projector(contents, small).path == "mmproj-small-F16.gguf"
    assert choose_projector(contents, large).path == "mmproj-large-BF16.gguf"
    assert choose_mtp_head(contents, large).path == "mtp-large-Q4_0.gguf"
    assert choose_projector(group("a-Q4_0.gguf"), small) is None
