"""Transcription of recordings by models with an audio projector: instructions, segments, subtitles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from afterglow.chat.output.response import ChatResponse
from afterglow.engine.host.remote_calls import AudioWindow
from afterglow.engine.types.request import Usage

TranscriptionTask: TypeAlias = Literal["transcribe", "translate"]
DEFAULT_WINDOW_SECONDS = 30.0
MAX_TOKENS_PER_SECOND = 20  # of a window: fast speech has about 6; a model that repeats itself ends here
MIN_MAX_TOKENS = 64
INSTRUCTIONS: dict[TranscriptionTask, str] = {
    "transcribe": "Transcribe the speech of this recording. Answer with the transcript only.",
    "translate": "Translate the speech of this recording into English. Answer with the translation only.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionSegment:
    """Text of one window of a recording. Models do not report times: `start` and `end` are those of the window.

    >>> TranscriptionSegment(
    ...     start=0.0, end=2.5, text="Hello.", tokens=(), mean_logprob=0.0, is_complete=True, usage=Usage()
    ... ).end
    2.5
    """

    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    mean_logprob: float
    is_complete: bool  # False: the text reached its maximum length
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcription:
    """Text of a recording and its segments.

    >>> usage = Usage()
    >>> segment = TranscriptionSegment(
    ...     start=0, end=2.5, text="Hello.", tokens=(), mean_logprob=0.0, is_complete=True, usage=usage
    ... )
    >>> print(Transcription(segments=(segment,)).to_srt())
    1
    00:00:00,000 --> 00:00:02,500
    Hello.
    <BLANKLINE>
    """

    segments: tuple[TranscriptionSegment, ...]

    @property
    def text(self) -> str:
        """Texts of all segments."""
        return " ".join(segment.text for segment in self.segments if segment.text)

    @property
    def seconds(self) -> float:
        """Length of the recording."""
        return self.segments[-1].end

    def to_srt(self) -> str:
        """Return the segments with text as SubRip subtitles."""
        return "".join(
            f"{number}\n{format_time(segment.start, ',')} --> {format_time(segment.end, ',')}\n{segment.text}\n\n"
            for number, segment in enumerate(self._list_cues(), start=1)
        ).removesuffix("\n")

    def to_vtt(self) -> str:
        """Return the segments with text as WebVTT subtitles."""
        cues = (
            f"{format_time(segment.start, '.')} --> {format_time(segment.end, '.')}\n{escape_cue(segment.text)}\n"
            for segment in self._list_cues()
        )
        return "\n".join(("WEBVTT\n", *cues))

    def _list_cues(self) -> list[TranscriptionSegment]:
        return [segment for segment in self.segments if segment.text]


def escape_cue(text: str) -> str:
    """Return text without the characters that have a meaning in WebVTT cues.

    >>> escape_cue("a --> b")
    'a --&gt; b'
    """
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def format_time(seconds: float, separator: str) -> str:
    """Format a time of subtitles.

    >>> format_time(3725.25, ",")
    '01:02:05,250'
    """
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{separator}{rest % 1000:03}"


def build_messages(
    window: AudioWindow, task: TranscriptionTask, language: str | None, prompt: str | None
) -> list[dict[str, Any]]:
    """Return the conversation whose answer is the text of a window. The instruction comes first: windows share it."""
    instruction = INSTRUCTIONS[task]
    instruction += f" The language of the speech is {language}." if language else ""
    instruction += f" Context: {prompt}" if prompt else ""
    parts = [{"type": "text", "text": instruction}, {"type": "audio", "audio": window.media}]
    return [{"role": "user", "content": parts}]


def compute_max_tokens(window: AudioWindow) -> int:
    """Return the maximum length of the text of a window."""
    return max(MIN_MAX_TOKENS, int((window.end - window.start) * MAX_TOKENS_PER_SECOND))


def build_transcription(windows: Sequence[AudioWindow], responses: Sequence[ChatResponse]) -> Transcription:
    """Combine the responses for all windows."""
    segments = []
    for window, response in zip(windows, responses, strict=True):
        logprobs = [token.logprob for token in response.tokens if token.logprob is not None]
        segments.append(
            TranscriptionSegment(
                start=window.start,
                end=window.end,
                text=" ".join(response.text.split()),
                tokens=tuple(token.token for token in response.tokens),
                mean_logprob=sum(logprobs) / len(logprobs) if logprobs else 0.0,
                is_complete=response.finish_reason == "stop",
                usage=response.usage,
            )
        )
    return Transcription(segments=tuple(segments))
