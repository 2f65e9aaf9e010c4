"""Formats of strings as patterns that match the whole text.

llguidance enforces formats inside JSON strings only. Property names and the unquoted text of tool calls need patterns.
They match what llguidance's formats match; its notation of IPv6 and of URIs is shortened.
"""

from __future__ import annotations

_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"({_BYTE}\.){{3}}{_BYTE}"
_WORD = "[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    [
        f"({_WORD}:){{7}}{_WORD}",
        *(f"({_WORD}:){{1,{before}}}(:{_WORD}){{1,{7 - before}}}" for before in range(1, 7)),
        f"({_WORD}:){{1,7}}:",
        f":(:{_WORD}){{1,7}}",
        "::",
    ]
)
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?\^_`{|}~]+"
_DAYS, _MONTHS = "[0-9]+D", "[0-9]+M([0-9]+D)?"
_MINUTES = "[0-9]+M([0-9]+S)?"
_TIME = f"T([0-9]+H({_MINUTES})?|{_MINUTES}|[0-9]+S)"
_PERCENT = "%[0-9a-fA-F]{2}"
_SEGMENT = rf"([a-zA-Z0-9\-._~!$&'()*+,;=:@]|{_PERCENT})"
_NAME = rf"([a-zA-Z0-9\-._~!$&'()*+,;=]|{_PERCENT})*"
_USER = rf"(([a-zA-Z0-9\-._~!$&'()*+,;=:]|{_PERCENT})*@)?"
_PATH = f"({_SEGMENT}|/)*"

TEXT_FORMAT_PATTERNS = {
    "duration": f"^P(({_DAYS}|{_MONTHS}|[0-9]+Y({_MONTHS})?)({_TIME})?|{_TIME}|[0-9]+W)$",
    "email": rf"^{_ATOM}(\.{_ATOM})*@({_LABEL}(\.{_LABEL})*|\[{_IPV4}\])$",
    "hostname": rf"^{_LABEL}(\.{_LABEL})*$",
    "ipv4": f"^{_IPV4}$",
    "ipv6": f"^({_IPV6})$",
    "uri": (
        rf"^[a-zA-Z][a-zA-Z0-9+\-.]*:(//{_USER}(\[({_IPV6})\]|{_NAME})(:[0-9]*)?(/{_PATH})?|/?({_SEGMENT}{_PATH})?)"
        rf"(\?({_SEGMENT}|[/?])*)?(\#({_SEGMENT}|[/?])*)?$"
    ),
}
