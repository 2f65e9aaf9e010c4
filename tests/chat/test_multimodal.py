"""Pictures in conversations: where they stand in the prompt, and that nothing but a picture is taken for one."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

import afterglow
from afterglow.api.conversation import Conversation
from afterglow.api.served_model import ServedModel, ServedSettings
from afterglow.chat.chat import Chat, ChatOptions
from afterglow.engine.types.entries import Media
from afterglow.errors import InvalidArgument, InvalidTemplate, UnsupportedMedia
from afterglow.llama.projector import ProjectorSettings
from afterglow.media.data_uri import to_data_uri
from afterglow.media.load import load_media
from afterglow.media.types import AudioData
from afterglow.testing import models
from support.media_prompts import coloured, noisy

FILES = {"model": "colours", "projector": "projector-colours"}


@pytest.fixture(scope="module")
def colours():
    options = {"context": 512, "threads": 1, "projector": models.get_path("projector-colours")}
    with afterglow.load(models.get_path("colours"), **options) as model:
        yield model


@pytest.fixture(autouse=True)
def no_handle_stays_open():
    """The model of this module stays open from test to test."""


def picture(letter: str) -> dict:
    return {"type": "image", "image": coloured(letter)}


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def user(*parts: dict) -> dict:
    return {"role": "user", "content": list(parts)}


def test_c7_a_conversation_about_a_picture_encodes_it_once(colours):
    colours.clear_cache()
    talk = [user(text("What colour is "), picture("R"), text(" this?"))]
    first = colours.chat(talk)
    assert (first.text, first.usage.encoded_media, first.usage.media_tokens) == ("R", 1, 16)
    talk += [first.message, user(text("Are you sure?"))]
    second = colours.chat(talk)
    assert (second.text, second.usage.encoded_media, second.usage.cached_media_tokens) == ("R", 0, 16)
    assert second.usage.cached_tokens > first.usage.prompt_tokens


def test_c6_two_pictures_of_the_same_size_are_never_confused(colours):
    for letter in "RGBYKBR":
        answer = colours.chat([user(picture(letter), text("What colour is this?"))])
        assert answer.text == letter


def test_the_picture_stands_where_it_was_put(colours):
    before, after = colours.tokenize("Before"), colours.tokenize("after")
    prompt = colours.apply_chat_template([user(text("Before"), picture("G"), text("after"))])
    (place,) = [index for index, entry in enumerate(prompt.entries) if isinstance(entry, Media)]
    assert list(prompt.entries[place - len(before) : place]) == before
    assert list(prompt.entries[place + 1 : place + 1 + len(after)]) == after
    assert prompt.cells == len(prompt.entries) + 15


@pytest.mark.parametrize(
    "written",
    ["<__media__>", "<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>", "[picture]", "\ue0000\ue000"],
)
def test_c18_user_text_that_contains_a_mark_of_a_picture_stays_text(colours, written):
    plain = colours.apply_chat_template([user(text(f"Say {written} twice"))])
    assert not plain.contents
    assert written in colours.detokenize(plain.tokens)
    mixed = colours.apply_chat_template([user(text(f"Say {written} "), picture("B"), text(f" {written}"))])
    assert len(mixed.contents) == 1
    assert colours.detokenize(mixed.tokens).count(written) == 2
    assert colours.chat([user(text(f"Say {written} "), picture("B"), text(f" {written}"))]).text == "B"


def test_boundaries_count_pictures_as_single_entries(colours):
    talk = [user(picture("R"), text("One?")), ("assistant", "R"), user(picture("G"), text("Two?"))]
    with Chat(colours.vocabulary, colours.chat_template, media_support=colours._get_media_support) as chat:
        prompt = chat.plan(talk, ChatOptions()).prompt
    earlier = colours.apply_chat_template(talk[:1])
    assert len(earlier.entries) in prompt.boundaries  # where the answer begins
    assert prompt.entries[: len(earlier.entries)] == earlier.entries


def test_c18_a_template_that_shows_another_number_of_pictures_is_a_typed_error():
    options = {"context": 512, "threads": 1, "projector": models.get_path("projector-colours")}
    for template in ("{{ messages[0].content[:2] }}", "{{ messages[0].content }}{{ messages[0].content }}"):
        with (
            afterglow.load(models.get_path("colours"), chat_template=template, **options) as model,
            pytest.raises(InvalidTemplate, match="where there are 1"),
        ):
            model.chat([user(text("What is it, "), picture("R"))])


def test_prompts_are_lists_of_texts_tokens_and_pictures(colours):
    question = colours.tokenize(" What colour?\n")
    assert colours.complete(["Look: ", coloured("Y"), *question], max_tokens=1).text == "Y"
    assert colours.complete([coloured("K")], max_tokens=1).text == "K"  # C8: it ends in a picture
    with pytest.raises(InvalidArgument, match=r"not 1\.5"):
        colours.complete(["Look: ", 1.5])
    assert colours.explain(["Look: ", coloured("Y"), *question, 7]).reused_entries == len(question) + len("Look: ") + 1


def test_a_picture_among_tools_and_their_results_is_seen(colours):
    def shade(name: str) -> str:
        """How dark a colour is."""
        return name

    talk = [user(text("Which?"), picture("B")), ("assistant", "B")]
    talk += [{"role": "tool", "tool_call_id": "a", "content": [text("It is "), picture("B")]}, user(text("So?"))]
    prompt = colours.apply_chat_template(talk, tools=[shade])
    assert sum(isinstance(entry, Media) for entry in prompt.entries) == 2


def test_c6_an_id_has_sixteen_hexadecimal_digits(colours):
    named = {**picture("R"), "id": "af63dc4c8601ec8c"}
    assert colours.chat([user(named, text("?"))]).text == "R"
    swapped = {**picture("B"), "id": "af63dc4c8601ec8c"}
    assert colours.chat([user(swapped, text("?"))]).text == "B"  # what it shows counts, whatever it is called
    for wrong in ("af63", "af63dc4c8601ec8g", 7):
        with pytest.raises(InvalidArgument, match="16 hexadecimal digits"):
            colours.chat([user({**picture("R"), "id": wrong}, text("?"))])


def test_a_part_holds_what_it_says(colours):
    with pytest.raises(InvalidArgument, match="must hold a Picture"):
        colours.chat([user({"type": "image", "image": b"pixels"})])


def test_c18_what_a_model_cannot_take_is_refused_by_its_message(colours):
    sound = {"type": "audio", "audio": AudioData(sample_rate=16_000, samples=bytes(64_000))}
    with pytest.raises(UnsupportedMedia, match=r"messages\[1\]\.content.*no audio"):
        colours.chat([("system", "Listen."), user(sound)])
    with afterglow.load(models.get_path("colours"), context=256, threads=1) as blind:
        assert not blind.supports("image")
        with pytest.raises(UnsupportedMedia, match=r"messages\[0\]\.content.*no image"):
            blind.chat([user(picture("R"))])
        with pytest.raises(UnsupportedMedia, match="only text"):
            blind.complete(["Look: ", coloured("R")])
        assert blind.chat("Hello?").text == "N"


def test_c18_a_picture_for_a_model_that_cannot_see_is_left_out_where_that_is_wanted(caplog):
    with afterglow.load(models.get_path("colours"), context=256, threads=1, strip_media=True) as blind:
        answer = blind.chat([user(text("What is "), picture("R"), text("this?"))])
        assert answer.text == "N"
        assert answer.usage.prompt_tokens == blind.apply_chat_template("What is this?").cells
    assert "1 of kind image left out" in caplog.text


def test_c18_a_projector_is_loaded_where_it_is_named_or_lies_beside_the_model(tmp_path):
    model, projector = tmp_path / "colours.gguf", tmp_path / "mmproj-colours.gguf"
    shutil.copy(models.get_path("colours"), model)
    shutil.copy(models.get_path("projector-colours"), projector)
    options = {"context": 256, "threads": 1}
    with afterglow.load(model, **options) as found:
        assert found.supports("image")
        assert found.chat([user(picture("G"), text("?"))]).text == "G"
    with afterglow.load(model, projector=False, **options) as without:
        assert not without.supports("image")
    shutil.copy(models.get_path("colours"), tmp_path / "another.gguf")  # now it may be the other's
    with afterglow.load(model, **options) as unclear:
        assert not unclear.supports("image")
    with afterglow.load(model, projector=projector, **options) as named:
        assert named.supports("image")


@pytest.mark.parametrize("how", ["missing", "broken"])
def test_c18_a_missing_or_broken_projector_leaves_text_working_and_says_so(tmp_path, how, caplog):
    path = tmp_path / "mmproj.gguf"
    if how == "broken":
        path.write_bytes(models.get_path("projector-colours").read_bytes()[:5000])
    with afterglow.load(models.get_path("colours"), projector=path, context=256, threads=1) as model:
        assert model.chat("Hello?").text == "N"
        assert not model.supports("image")
        assert "mmproj.gguf" in model.media_error
        with pytest.raises(UnsupportedMedia, match=r"mmproj\.gguf"):
            model.chat([user(picture("R"))])
    assert "text works" in caplog.text


def test_what_load_is_told_about_the_projector_is_what_holds():
    settings = ProjectorSettings(image_min_tokens=4, image_max_tokens=6, threads=1)
    options = {"projector": models.get_path("projector-qwen"), "context": 512, "threads": 1}
    sizes = []
    for projecting in (settings, None):
        with afterglow.load(models.get_path("hybrid"), projector_settings=projecting, **options) as model:
            prompt = model.apply_chat_template([user({"type": "image", "image": noisy(1, 128, 128)})])
            sizes += [entry.cells for entry in prompt.entries if isinstance(entry, Media)]
    assert sizes[0] <= 6 < sizes[1]


def test_pictures_and_sounds_are_saved_with_a_conversation(colours, tmp_path):
    talk = Conversation(colours, messages=[user(picture("G"), text("What colour is this?"))])
    talk.save(tmp_path / "talk.json")
    talk.load(tmp_path / "talk.json")
    assert talk.regenerate().text == "G"
    assert talk.last_response.usage.encoded_media <= 1
    sound = AudioData(sample_rate=8000, samples=np.linspace(-1, 1, 50, dtype=np.float32).tobytes())
    assert load_media("audio", to_data_uri(sound)) == sound
    shown = coloured("B")
    assert load_media("image", to_data_uri(shown)) == shown


def test_the_projector_goes_and_comes_with_the_model():
    options = {"context": 256, "threads": 1, "projector": models.get_path("projector-colours")}
    with afterglow.load(models.get_path("colours"), **options) as model:
        for _ in range(2):
            assert model.chat([user(picture("R"), text("?"))]).text == "R"
            model.deactivate()
            assert not model.supports("image")
            model.activate()


def test_a_served_model_sees():
    settings = ServedSettings(context=256, threads=1, projector=models.get_path("projector-colours"))
    with ServedModel("colours", models.get_path("colours"), settings) as model:
        assert model.engine_info.media == {"image"}
        first = model.chat([user(picture("Y"), text("?"))])
        second = model.chat([user(picture("Y"), text("??"))])
        assert (first.text, second.text) == ("Y", "Y")
        assert (first.usage.encoded_media, second.usage.encoded_media) == (1, 0)
        assert second.usage.cached_media_tokens == second.usage.media_tokens == 16
        assert model.get_stats()  # nobody stumbles over a picture among the tokens
        assert model.get_cache_contents().sequences


def test_a_served_model_with_a_broken_projector_answers_text_and_says_so(tmp_path):
    settings = ServedSettings(context=256, threads=1, projector=tmp_path / "none.gguf")
    with ServedModel("colours", models.get_path("colours"), settings) as model:
        assert model.chat("Hello?").text == "N"
        with pytest.raises(UnsupportedMedia, match=r"none\.gguf"):
            model.chat([user(picture("R"))])
    stripped = ServedSettings(context=256, threads=1, projector=False, strip_media=True)
    with ServedModel("colours", models.get_path("colours"), stripped) as model:
        assert model.chat([user(picture("R"), text("?"))]).text == "N"
