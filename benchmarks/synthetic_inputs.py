"""Seeded texts and images: content of the prompts of the workloads, and vocabulary of the hybrid model.

A word with its leading space is one token of the hybrid model, and nearly always one token of SmolLM2. Sizes in words
are therefore close to sizes in tokens.
"""

from __future__ import annotations

import base64
import random
import struct
import zlib

_WORD_LIST = """
able about above across after again against air all almost alone along already also always among animal another answer
any area arm around art ask away back bad bank base battle beach bear beauty bed been before begin behind believe
below best better between big bird black blue board boat body book born both bottom box boy branch bread break bridge
bright bring brother brown build burn bus but buy call came camp car care carry case cat cause center chair chance
change chief child choose city class clean clear climb close cloth cloud coast cold color come common complete control
cook cool copy corn corner cost could count country course cover cow cross crowd cry cut dance dark day dead deal deep
desert design did differ direct distant divide doctor does dog door down draw dream dress drink drive drop dry during
each early earth east easy eat edge effect egg eight either electric else end enemy engine enough enter equal even
evening event ever every exact example except eye face fact fair fall family famous far farm fast father favor fear
feed feel feet fell field fight figure fill final find fine finger finish fire first fish fit five floor flow flower
fly follow food foot force forest form forward found four free fresh friend from front fruit full fun game garden
gather gave general gentle get girl give glad glass gold gone good got govern grand grass gray great green grew ground
group grow guess guide had hair half hand happen happy hard has hat have head hear heart heat heavy held help here
high hill history hold hole home hope horse hot hour house how huge human hundred hunt hurry ice idea inch industry
insect instant interest iron island job join joy jump just keep kept key kill kind king knew know lady lake land
language large last late laugh law lead learn least leave left leg length less let letter level life lift light like
line list listen little live locate log long look lost loud love low machine made magnet main major make man many map
mark market mass master match material matter may mean measure meat meet melody men metal method middle might mile
milk million mind mine minute miss mix modern moment money month moon more morning most mother motion mount mountain
mouth move much multiply music must name nation natural nature near neck need neighbor never new next night nine noise
noon nor north nose note nothing notice noun now number object observe occur ocean off offer office often oil old once
one only open operate opposite order other our out over own oxygen page paint pair paper parent part party pass past
path pattern pay people perhaps period person picture piece place plain plan plane planet plant play please poem point
poor port pose position possible post pound power practice prepare present press pretty print problem process produce
product proper protect prove provide pull push put quart question quick quiet quite race radio rail rain raise ran
range rather reach read ready real reason receive record red region remember repeat reply represent require rest
result rich ride right ring rise river road rock roll room root rope rose round row rule run safe said sail salt same
sand sat save saw say scale school science score sea search season seat second section see seed seem select self sell
send sense sent sentence separate serve set settle seven shall shape share sharp sheet shell shine ship shoe shop shore
short should shoulder shout show side sight sign silent silver similar simple since sing single sister sit six size
skill skin sky sleep slip slow small smell smile snow soft soil soldier solution solve some son song soon sound south
space speak special speech speed spell spend spoke spot spread spring square stand star start state station stay steam
steel step stick still stone stood stop store story straight strange stream street strong student study subject
success such sudden sugar suggest suit summer sun supply support sure surface surprise swim symbol system table tail
take talk tall teach team teeth tell ten term test than thank their them then there these they thick thin thing think
third those though thought thousand three through throw thus tie time tiny tire together told tone too took tool top
total touch toward town track trade train travel tree triangle trip trouble truck true try tube turn twenty two type
under unit until use usual valley value vary verb very view village visit voice vowel wait walk wall want war warm was
wash watch water wave way wear weather week weight well went were west what wheel when where which while white who
whole why wide wife wild will win wind window wing winter wire wish with woman wonder wood word work world would write
wrong yard year yellow yes yet you young your
"""
WORDS = _WORD_LIST.split()
TILE_PIXELS = 8


def random_text(seed: str, words: int) -> str:
    """Return `words` random words in sentences. Texts of two seeds diverge within one or two words.

    >>> random_text("a", 3) == random_text("a", 3) != random_text("b", 3)
    True
    """
    rng = random.Random(seed)
    text: list[str] = []
    while len(text) < words:
        sentence = rng.choices(WORDS, k=min(rng.randint(8, 16), words - len(text)))
        sentence[-1] += "."
        text += sentence
    return " " + " ".join(text)


def random_image_url(seed: str, side: int) -> str:
    """Return a data URL of a square PNG of `side` pixels with randomly coloured tiles.

    The PNG is not compressed, so that its bytes are the same everywhere.

    >>> random_image_url("a", 16)[:22]
    'data:image/png;base64,'
    """
    rng = random.Random(seed)
    tiles_per_side = side // TILE_PIXELS
    tiles = [[rng.randbytes(3) for _ in range(tiles_per_side)] for _ in range(tiles_per_side)]
    rows = [b"\0" + b"".join(tile * TILE_PIXELS for tile in tiles[line // TILE_PIXELS]) for line in range(side)]
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"".join(rows), 0)), (b"IEND", b"")]
    file = b"\x89PNG\r\n\x1a\n" + b"".join(_encode_png_chunk(kind, data) for kind, data in chunks)
    return "data:image/png;base64," + base64.b64encode(file).decode()


def _encode_png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
