"""Token ids to text: whole characters only, and an end at the first stop string."""

import random

import pytest
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, SPMStreamingDetokenizer

import mlx_dspark
from mlx_dspark.text import Piece, TextStream

EOS = 0


class Words:
    """A tokenizer, and its own detokenizer, whose ids are the given strings."""

    def __init__(self, *words: str):
        self._words = words
        self.detokenizer = self
        self.last_segment, self.tokens = "", []

    def decode(self, tokens: list[int]) -> str:
        return "".join(self._words[token] for token in tokens)

    def add_token(self, token: int):
        self.tokens.append(token)
        self.last_segment = self._words[token]

    def finalize(self):
        self.last_segment = ""


def stream(*words: str, stop=(), silent=()) -> TextStream:
    return TextStream(Words(*words), stop, frozenset(silent))


def feed_all(text_stream: TextStream, *rounds: list[int]) -> list[Piece]:
    """Feed rounds until one stops; then finish, as the caller does."""
    pieces = []
    for tokens in rounds:
        pieces.append(text_stream.feed(tokens))
        if pieces[-1].stopped:
            break
    return [*pieces, text_stream.finish()]


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def in_rounds(ids: list[int], size: int) -> list[list[int]]:
    return [ids[i : i + size] for i in range(0, len(ids), size)]


@pytest.fixture(scope="module")
def tokenizer():
    return mlx_dspark.load(draft=False).tokenizer


# --- stop strings


@pytest.mark.parametrize(
    ("words", "rounds", "stop", "text", "kept"),
    [
        pytest.param(["a", "b END c", "d"], [[0, 1, 2]], ["END"], "ab ", 2, id="inside-one-token"),
        pytest.param(["END", "a"], [[0, 1]], ["END"], "", 1, id="a-whole-token-first"),
        pytest.param(["a", "xEN", "Dy", "d"], [[0, 1, 2, 3]], ["END"], "ax", 3, id="across-tokens"),
        pytest.param(["E", "N", "D", "d"], [[0, 1, 2, 3]], ["END"], "", 3, id="one-letter-each"),
        pytest.param(["xEN", "Dy", "d"], [[0], [1, 2]], ["END"], "x", 1, id="across-rounds"),
        pytest.param(["E", "N", "D"], [[0], [1], [2]], ["END"], "", 1, id="across-three-rounds"),
        pytest.param(["a B A", "c"], [[0, 1]], ["A", "B"], "a ", 1, id="earliest-in-the-text"),
        pytest.param(["a B A", "c"], [[0, 1]], ["B", "A"], "a ", 1, id="whatever-their-order"),
        pytest.param(["xaab"], [[0]], ["ab", "aab"], "x", 1, id="the-longer-starts-earlier"),
        pytest.param(["aa", "ab"], [[0, 1]], ["aab"], "a", 2, id="overlaps-itself"),
        pytest.param(["ENEND"], [[0]], ["END"], "EN", 1, id="false-start-then-stop"),
        pytest.param(["é", "\n\nQ", ":"], [[0, 1, 2]], ["\n\nQ:"], "é", 3, id="newlines"),
    ],
)
def test_the_text_ends_before_the_stop_string(words, rounds, stop, text, kept):
    pieces = feed_all(stream(*words, stop=stop), *rounds)
    assert text_of(pieces) == text
    assert pieces[-2] == Piece(pieces[-2].text, kept, True)
    assert pieces[-1] == Piece("", 0, False)


def test_half_a_character_behind_a_stop_string_is_not_released():
    class Halved(Words):
        def finalize(self):
            self.last_segment = "\ufffd"

    text_stream = TextStream(Halved("aEND"), ["END"], frozenset())
    assert text_stream.feed([0]) == Piece("a", 1, True)
    assert text_stream.finish() == Piece("", 0, False)
    assert TextStream(Halved("a"), [], frozenset()).finish().text == "\ufffd"


def test_a_possible_beginning_is_held_until_it_is_decided():
    text_stream = stream("xEN", "T", "END", stop=["END"])
    assert text_stream.feed([0]) == Piece("x", 1, False)
    assert text_stream.feed([1]) == Piece("ENT", 1, False)
    assert text_stream.feed([2]) == Piece("", 1, True)


def test_only_what_can_still_become_a_stop_string_is_held():
    text_stream = stream("EN", "EN", stop=["END"])
    assert text_stream.feed([0]).text == ""
    assert text_stream.feed([1]).text == "EN"


def test_a_stop_string_that_never_completes_is_released_at_the_end():
    pieces = feed_all(stream("a", "EN", stop=["END"]), [0, 1])
    assert pieces == [Piece("a", 2, False), Piece("EN", 0, False)]


def test_nothing_is_held_without_stop_strings():
    assert stream("a", "b").feed([0, 1]) == Piece("ab", 2, False)


def test_an_empty_round_adds_nothing():
    assert stream("a").feed([]) == Piece("", 0, False)


def test_stop_tokens_are_kept_and_not_shown():
    assert stream("<eos>", "a", silent=[EOS]).feed([1, EOS]) == Piece("a", 2, False)


@pytest.mark.parametrize("stop", [[""], ["END", ""]])
def test_an_empty_stop_string_is_refused(stop):
    with pytest.raises(ValueError, match="stop string is empty: leave it out"):
        stream("a", stop=stop)


@pytest.mark.parametrize("seed", range(20))
def test_any_split_into_tokens_and_rounds_gives_the_same_text(seed):
    rng = random.Random(seed)
    text = "".join(rng.choice("abE") for _ in range(40))
    stop = ["".join(rng.choice("abE") for _ in range(rng.randint(2, 5))) for _ in range(2)]
    cuts = sorted({0, len(text), *rng.sample(range(1, len(text)), 12)})
    words = [text[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    middle = rng.randint(1, len(words) - 1)
    pieces = feed_all(stream(*words, stop=stop), list(range(middle)), list(range(middle, len(words))))
    found = [at for at in map(text.find, stop) if at >= 0]
    assert text_of(pieces) == (text[: min(found)] if found else text)
    assert any(piece.stopped for piece in pieces) == bool(found)


# --- ids that only the target has


class Padded:
    """A tokenizer of three words for a target of more rows, with one of mlx-lm's own detokenizers."""

    words = ("a", "b", "c")

    def __init__(self, kind):
        self._kind = kind

    @property
    def detokenizer(self):
        return self._kind(self)

    def __len__(self):
        return len(self.words)

    def convert_ids_to_tokens(self, ids):
        return [self.words[token] for token in ids]

    def decode(self, tokens):
        return "".join(self.convert_ids_to_tokens(tokens))


@pytest.mark.parametrize("kind", [SPMStreamingDetokenizer, BPEStreamingDetokenizer], ids=lambda kind: kind.__name__)
def test_ids_outside_the_tokenizer_are_empty_text(kind):
    pieces = feed_all(TextStream(Padded(kind), ["bc"], frozenset()), [3, 0], [99], [1, 7, 2, 0])
    assert text_of(pieces) == "a" and pieces[-2] == Piece("", 3, True)
    assert text_of(feed_all(TextStream(Padded(kind), (), frozenset()), [0, 3, 1, 99])) == "ab"


# --- the embedded tokenizer


TEXTS = ["plain ascii, twice  spaced\n\n\tand tabs", "naïve café 日本語 🎉 emoji", "🎉🎉", "\n", "ends with spaces  ",
         " leading space", "  two leading spaces", "    def indented(self):", " ", "   ", " é", " \n x"]


@pytest.mark.parametrize("size", [1, 3, 100], ids="rounds-of-{}".format)
@pytest.mark.parametrize("text", TEXTS, ids=repr)
def test_streamed_text_is_the_decoded_text(tokenizer, text, size):
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = feed_all(TextStream(tokenizer, (), frozenset({EOS})), *in_rounds(ids, size))
    assert text_of(pieces) == tokenizer.decode(ids) == text


def test_no_piece_holds_half_a_character(tokenizer):
    ids = tokenizer.encode("é日🎉", add_special_tokens=False)
    assert len(ids) > 5, "the tokenizer must split these characters for the test to mean anything"
    pieces = feed_all(TextStream(tokenizer, (), frozenset()), *in_rounds(ids, 1))
    assert "\ufffd" not in text_of(pieces) and text_of(pieces) == "é日🎉"


@pytest.mark.parametrize("seed", range(10))
def test_random_ids_decode_as_a_whole(tokenizer, seed):
    rng = random.Random(seed)
    nul = tokenizer.encode("\0", add_special_tokens=False)[0]  # mlx-lm 0.32.2 shows the byte 0 as a letter
    ids = [token for token in (rng.randrange(2, 4096) for _ in range(60)) if token != nul]
    pieces = feed_all(TextStream(tokenizer, (), frozenset({EOS})), *in_rounds(ids, 7))
    assert text_of(pieces) == tokenizer.decode(ids)


def test_ids_that_the_embedded_tokenizer_lacks_add_nothing(tokenizer):
    ids = tokenizer.encode("é = 1", add_special_tokens=False)
    padded = [token for known in ids for token in (known, len(tokenizer), 10**6)]
    assert text_of(feed_all(TextStream(tokenizer, (), frozenset()), padded)) == "é = 1"


def test_a_stop_string_of_split_characters(tokenizer):
    ids = tokenizer.encode("one 日本 two", add_special_tokens=False)
    pieces = feed_all(TextStream(tokenizer, ["日本"], frozenset({EOS})), ids[:4], ids[4:])
    assert text_of(pieces) == "one " and pieces[-2].stopped


def test_streams_of_one_tokenizer_do_not_share_state(tokenizer):
    first, second = (TextStream(tokenizer, (), frozenset()) for _ in range(2))
    ids = tokenizer.encode("日", add_special_tokens=False)
    first.feed(ids[:1])
    assert text_of(feed_all(second, ids)) == "日"
    assert text_of(feed_all(first, ids[1:])) == "日"
