"""Images in conversations: position in the prompt, placeholders, encoding, projectors."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from afterglow.agents.conversation import Conversation
from afterglow.chat.chat import Chat, ChatOptions
from afterglow.engine.types.entries import Media
from afterglow.errors import InvalidArgument, InvalidTemplate, UnsupportedMedia
from afterglow.llama.projector import ProjectorSettings
from afterglow.media.data_uri import to_data_uri
from afterglow.media.load import load_media
from afterglow.media.types import AudioData
from afterglow.testing import models
from support.greedy import load_greedy
from support.media_prompts import color_image, noise_image

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def vision_model():
    options = {"context": 512, "threads": 1, "projector": models.get_path("projector-colors")}
    with load_greedy(models.get_path("colors"), **options) as model:
        yield model


@pytest.fixture(autouse=True)
def no_handle_stays_open():
    """Disable the check: the model of this module stays open between tests."""


def image_part(letter: str) -> dict:
    return {"type": "image", "image": color_image(letter)}


def text_part(text: str) -> dict:
    return {"type": "text", "text": text}


def user_message(*parts: dict) -> dict:
    return {"role": "user", "content": list(parts)}


def test_c7_an_image_is_encoded_once_per_conversation(vision_model):
    vision_model.clear_cache()
    messages = [user_message(text_part("What colour is "), image_part("R"), text_part(" this?"))]
    first = vision_model.chat(messages)
    assert (first.text, first.usage.encoded_media, first.usage.media_tokens) == ("R", 1, 16)
    messages += [first.message, user_message(text_part("Are you sure?"))]
    second = vision_model.chat(messages)
    assert (second.text, second.usage.encoded_media, second.usage.cached_media_tokens) == ("R", 0, 16)
    assert second.usage.cached_tokens > first.usage.prompt_tokens


def test_c6_images_of_the_same_size_are_distinguished(vision_model):
    for letter in "RGBYKBR":
        response = vision_model.chat([user_message(image_part(letter), text_part("What colour is this?"))])
        assert response.text == letter


def test_an_image_is_at_its_position_in_the_prompt(vision_model):
    before, after = vision_model.tokenize("Before"), vision_model.tokenize("after")
    prompt = vision_model.apply_chat_template([user_message(text_part("Before"), image_part("G"), text_part("after"))])
    (position,) = [index for index, entry in enumerate(prompt.entries) if isinstance(entry, Media)]
    assert list(prompt.entries[position - len(before) : position]) == before
    assert list(prompt.entries[position + 1 : position + 1 + len(after)]) == after
    assert prompt.cells == len(prompt.entries) + 15


@pytest.mark.parametrize(
    "marker",
    ["<__media__>", "<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>", "[image]", "\ue0000\ue000"],
)
def test_c18_media_markers_in_user_text_stay_text(vision_model, marker):
    plain = vision_model.apply_chat_template([user_message(text_part(f"Say {marker} twice"))])
    assert not plain.media
    assert marker in vision_model.detokenize(plain.tokens)
    mixed = vision_model.apply_chat_template(
        [user_message(text_part(f"Say {marker} "), image_part("B"), text_part(f" {marker}"))]
    )
    assert len(mixed.media) == 1
    assert vision_model.detokenize(mixed.tokens).count(marker) == 2
    assert (
        vision_model.chat([user_message(text_part(f"Say {marker} "), image_part("B"), text_part(f" {marker}"))]).text
        == "B"
    )


def test_boundaries_count_images_as_single_entries(vision_model):
    messages = [
        user_message(image_part("R"), text_part("One?")),
        ("assistant", "R"),
        user_message(image_part("G"), text_part("Two?")),
    ]
    with Chat(
        vision_model.vocabulary, vision_model.chat_template, media_support=vision_model._get_media_support
    ) as chat:
        prompt = chat.plan(messages, ChatOptions()).prompt
    earlier = vision_model.apply_chat_template(messages[:1])
    assert len(earlier.entries) in prompt.boundaries  # the start of the response
    assert prompt.entries[: len(earlier.entries)] == earlier.entries


def test_c18_a_template_that_drops_or_repeats_images_is_a_typed_error():
    options = {"context": 512, "threads": 1, "projector": models.get_path("projector-colors")}
    for template in ("{{ messages[0].content[:2] }}", "{{ messages[0].content }}{{ messages[0].content }}"):
        with (
            load_greedy(models.get_path("colors"), chat_template=template, **options) as model,
            pytest.raises(InvalidTemplate, match="the messages have 1"),
        ):
            model.chat([user_message(text_part("What is it, "), image_part("R"))])


def test_prompts_are_lists_of_text_tokens_and_images(vision_model):
    question = vision_model.tokenize(" What colour?\n")
    assert vision_model.complete(["Look: ", color_image("Y"), *question], max_tokens=1).text == "Y"
    assert vision_model.complete([color_image("K")], max_tokens=1).text == "K"  # C8: the prompt ends with an image
    with pytest.raises(InvalidArgument, match=r"not 1\.5"):
        vision_model.complete(["Look: ", 1.5])
    assert (
        vision_model.explain(["Look: ", color_image("Y"), *question, 7]).reused_entries
        == len(question) + len("Look: ") + 1
    )


def test_images_in_tool_results_are_part_of_the_prompt(vision_model):
    def shade(name: str) -> str:
        """Return the shade of a color."""
        return name

    messages = [user_message(text_part("Which?"), image_part("B")), ("assistant", "B")]
    messages += [
        {"role": "tool", "tool_call_id": "a", "content": [text_part("It is "), image_part("B")]},
        user_message(text_part("So?")),
    ]
    prompt = vision_model.apply_chat_template(messages, tools=[shade])
    assert sum(isinstance(entry, Media) for entry in prompt.entries) == 2


def test_c6_an_id_has_sixteen_hexadecimal_digits(vision_model):
    with_id = {**image_part("R"), "id": "af63dc4c8601ec8c"}
    assert vision_model.chat([user_message(with_id, text_part("?"))]).text == "R"
    other = {**image_part("B"), "id": "af63dc4c8601ec8c"}
    assert vision_model.chat([user_message(other, text_part("?"))]).text == "B"  # the content counts, not the id
    for invalid in ("af63", "af63dc4c8601ec8g", 7):
        with pytest.raises(InvalidArgument, match="16 hexadecimal digits"):
            vision_model.chat([user_message({**image_part("R"), "id": invalid}, text_part("?"))])


def test_an_image_part_must_hold_image_data(vision_model):
    with pytest.raises(InvalidArgument, match="must be ImageData"):
        vision_model.chat([user_message({"type": "image", "image": b"pixels"})])


def test_c18_unsupported_media_is_an_error_that_names_the_message(vision_model):
    audio_part = {"type": "audio", "audio": AudioData(sample_rate=16_000, samples=bytes(64_000))}
    with pytest.raises(UnsupportedMedia, match=r"messages\[1\]\.content.*does not support audio"):
        vision_model.chat([("system", "Listen."), user_message(audio_part)])
    with load_greedy(models.get_path("colors"), context=256, threads=1) as text_model:
        assert not text_model.supports("image")
        with pytest.raises(UnsupportedMedia, match=r"messages\[0\]\.content.*does not support image"):
            text_model.chat([user_message(image_part("R"))])
        with pytest.raises(UnsupportedMedia, match="only text"):
            text_model.complete(["Look: ", color_image("R")])
        assert text_model.chat("Hello?").text == "N"


def test_c18_unsupported_media_is_stripped_if_configured(caplog):
    with load_greedy(models.get_path("colors"), context=256, threads=1, strip_media=True) as text_model:
        response = text_model.chat([user_message(text_part("What is "), image_part("R"), text_part("this?"))])
        assert response.text == "N"
        assert response.usage.prompt_tokens == text_model.apply_chat_template("What is this?").cells
    assert "dropped 1 attachments of kind image" in caplog.text


def test_c18_a_projector_is_loaded_by_name_or_from_the_directory_of_the_model(tmp_path):
    model, projector = tmp_path / "vision_model.gguf", tmp_path / "mmproj-vision_model.gguf"
    shutil.copy(models.get_path("colors"), model)
    shutil.copy(models.get_path("projector-colors"), projector)
    options = {"context": 256, "threads": 1}
    with load_greedy(model, **options) as discovered:
        assert discovered.supports("image")
        assert discovered.chat([user_message(image_part("G"), text_part("?"))]).text == "G"
    with load_greedy(model, projector=False, **options) as without:
        assert not without.supports("image")
    shutil.copy(models.get_path("colors"), tmp_path / "another.gguf")  # the projector may belong to either model
    with load_greedy(model, **options) as ambiguous:
        assert not ambiguous.supports("image")
    with load_greedy(model, projector=projector, **options) as named:
        assert named.supports("image")


@pytest.mark.parametrize("state", ["missing", "damaged"])
def test_c18_text_works_with_a_missing_or_damaged_projector(tmp_path, state, caplog):
    path = tmp_path / "mmproj.gguf"
    if state == "damaged":
        path.write_bytes(models.get_path("projector-colors").read_bytes()[:5000])
    with load_greedy(models.get_path("colors"), projector=path, context=256, threads=1) as model:
        assert model.chat("Hello?").text == "N"
        assert not model.supports("image")
        assert "mmproj.gguf" in model.media_error
        with pytest.raises(UnsupportedMedia, match=r"mmproj\.gguf"):
            model.chat([user_message(image_part("R"))])
    assert "text works" in caplog.text


def test_the_projector_settings_of_load_are_applied():
    settings = ProjectorSettings(image_min_tokens=4, image_max_tokens=6, threads=1)
    options = {"projector": models.get_path("projector-qwen"), "context": 512, "threads": 1}
    sizes = []
    for projector_settings in (settings, None):
        with load_greedy(models.get_path("hybrid"), projector_settings=projector_settings, **options) as model:
            prompt = model.apply_chat_template([user_message({"type": "image", "image": noise_image(1, 128, 128)})])
            sizes += [entry.cells for entry in prompt.entries if isinstance(entry, Media)]
    assert sizes[0] <= 6 < sizes[1]


def test_media_is_saved_with_a_conversation(vision_model, tmp_path):
    conversation = Conversation(
        vision_model, messages=[user_message(image_part("G"), text_part("What colour is this?"))]
    )
    conversation.save(tmp_path / "conversation.json")
    conversation.load(tmp_path / "conversation.json")
    assert conversation.regenerate().text == "G"
    assert conversation.last_response.usage.encoded_media <= 1
    audio = AudioData(sample_rate=8000, samples=np.linspace(-1, 1, 50, dtype=np.float32).tobytes())
    assert load_media("audio", to_data_uri(audio)) == audio
    image = color_image("B")
    assert load_media("image", to_data_uri(image)) == image


def test_the_projector_is_unloaded_and_loaded_with_the_model():
    options = {"context": 256, "threads": 1, "projector": models.get_path("projector-colors")}
    with load_greedy(models.get_path("colors"), **options) as model:
        for _ in range(2):
            assert model.chat([user_message(image_part("R"), text_part("?"))]).text == "R"
            model.deactivate()
            assert not model.supports("image")
            model.activate()


def test_a_model_in_a_child_process_supports_images():
    settings = {"context": 256, "threads": 1, "projector": models.get_path("projector-colors")}
    with load_greedy(models.get_path("colors"), host="process", **settings) as model:
        assert model.engine_info.media == {"image"}
        first = model.chat([user_message(image_part("Y"), text_part("?"))])
        second = model.chat([user_message(image_part("Y"), text_part("??"))])
        assert (first.text, second.text) == ("Y", "Y")
        assert (first.usage.encoded_media, second.usage.encoded_media) == (1, 0)
        assert second.usage.cached_media_tokens == second.usage.media_tokens == 16
        assert model.get_stats()  # media among the tokens is handled
        assert model.get_cache_contents().sequences


def test_a_model_in_a_child_process_with_a_missing_projector_supports_text(tmp_path):
    settings = {"context": 256, "threads": 1, "host": "process"}
    with load_greedy(models.get_path("colors"), projector=tmp_path / "none.gguf", **settings) as model:
        assert model.chat("Hello?").text == "N"
        with pytest.raises(UnsupportedMedia, match=r"none\.gguf"):
            model.chat([user_message(image_part("R"))])
    with load_greedy(models.get_path("colors"), projector=False, strip_media=True, **settings) as model:
        assert model.chat([user_message(image_part("R"), text_part("?"))]).text == "N"
