# SPDX-License-Identifier: Apache-2.0
"""The subcommand `show`: what it says of a batch, against the dense mask and hand arithmetic, and
what it refuses."""

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.plugins.composite_attention import show
from vllm.plugins.composite_attention.show import Request, Settings

from tests.dense_reference import image_mask


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="show")
    show.add_arguments(made)
    return made


def shown(capsys: pytest.CaptureFixture[str], arguments: str) -> str:
    assert show.run(parser().parse_args(arguments.split())) == 0
    return capsys.readouterr().out


def refused(arguments: str) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the caller judges the sentence
        show.run(parser().parse_args(arguments.split()))
    return str(error.value)


def test_the_text_shows_child_reason_segments_and_mask(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "6/6:1-3 2/7:0-2") == (
        "2 requests (mm-prefix, no window): general child. Request 0 has queries in its image 1-3 "
        "that see keys after them.\n"
        "mask: . hidden  x causal  # opened by an image  A B .. images\n"
        "\n"
        "request 0  6/6:1-3\n"
        "  causal  queries 0-0         keys 0-0\n"
        "  image   queries 1-3         keys 0-3\n"
        "  causal  queries 4-5         keys 0-5\n"
        "       AAA\n"
        "  0   x.....\n"
        "  1 A xx##..\n"
        "  2 A xxx#..\n"
        "  3 A xxxx..\n"
        "  4   xxxxx.\n"
        "  5   xxxxxx\n"
        "\n"
        "request 1  2/7:0-2\n"
        "  causal  queries 5-6         keys 0-6\n"
        "      AAA\n"
        "  5   xxxxxx.\n"
        "  6   xxxxxxx\n"
    )


def test_a_window_bounds_text_and_images(capsys: pytest.CaptureFixture[str]) -> None:
    """Queries 2 to 6 of an image 4-9, of which keys up to 6 exist, with a window of 3."""
    lines = shown(capsys, "5/7:4-9 --window 3").splitlines()
    assert lines[4:] == [
        "  causal  queries 2-3         keys 0-3         window 3",
        "  image   queries 4-6         keys 2-6         window 3",
        "          AAA",
        "  2   xxx....",
        "  3   .xxx...",
        "  4 A ..xxx##",
        "  5 A ...xxx#",
        "  6 A ....xxx",
    ]


def test_an_unclamped_window_opens_keys_behind_it_to_a_decode(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = shown(capsys, "1/10:2-9 --window 3 --unclamped")
    assert "(mm-prefix, unclamped window 3): general child." in out
    assert "Request 0 has queries in its image 2-9 that see all of it" in out
    assert "  image   queries 9-9         keys 2-9         window 8\n" in out
    assert out.endswith("  9 A ..#####xxx\n")


@pytest.mark.parametrize(
    ("arguments", "child", "reason"),
    [
        ("1/40:3-6 8/20:0-5,14-17", "general", "Request 1 has queries in its image 14-17"),
        ("1/40:3-6 5/20:0-5", "causal", "No query sees more than the causal mask shows it."),
        ("4/9:0-3,9-12", "causal", "No query sees more"),  # one in the past, one still to come
        ("1/9 4/9 --policy prefill-decode", "general", "Request 1 is a prefill of 4 queries."),
        ("4/9 --policy prefill-decode --speculative-tokens 3", "causal", "none is a prefill's."),
        ("1/9 4/9p --policy prefill-decode --speculative-tokens 3", "general", "Request 1 is a"),
        ("4/9p 9/20 --policy prefill-decode", "general", "Request 0 is a prefill of 4 queries."),
        ("1/9p 4/9 --policy prefill-decode", "causal", "none is a prefill's."),
        ("1/9p 4/9:5-8 --policy prefill-decode", "general", "Request 1 has queries in its image"),
    ],
)
def test_the_child_and_its_reason(
    arguments: str, child: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    headline = shown(capsys, arguments).splitlines()[0]
    assert f"): {child} child. " in headline
    assert reason in headline


def test_a_long_request_is_scaled_down_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "1000/1000:100-299")
    assert "scaled down to 21 x 11 (queries x keys) a character" in out
    lines = out[out.index("scaled down") :].splitlines()[1:]
    assert len(lines) == 1 + 48
    # Queries 105 to 125 lie in the image: keys 0-98 seen, up to 307 opened in part, none after.
    assert lines[6].strip() == "105 A " + "x" * 9 + "#" * 19 + "." * 63


def test_a_character_is_whole_only_where_no_key_of_it_is_hidden(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = shown(capsys, "1/1000 --window 15")
    # Keys 985 to 999 are seen: of 979-989 a part, of 990-1000 all that there are.
    assert out.splitlines()[-1].strip() == "999   " + "." * 89 + "+x"


@st.composite
def requests_of_a_batch(draw: st.DrawFn) -> list[Request]:
    """Up to four requests of up to 60 tokens, images anywhere, also past the last token."""
    requests = []
    for _ in range(draw(st.integers(1, 4))):
        seq_len = draw(st.integers(1, 60))
        cuts = sorted(draw(st.sets(st.integers(0, seq_len + 9), max_size=8)))
        images = tuple((a, b - 1) for a, b in zip(cuts[0::2], cuts[1::2], strict=False))
        requests.append(Request(draw(st.integers(1, seq_len)), seq_len, images))
    return requests


WINDOWS = st.integers(1, 40)
SETTINGS = st.builds(Settings, window=WINDOWS | st.none()) | st.builds(
    Settings, window=WINDOWS, clamped=st.booleans()
)


@given(requests_of_a_batch(), SETTINGS)
def test_segments_together_are_the_mask_that_is_drawn(
    requests: list[Request], settings: Settings
) -> None:
    for request, segments in zip(requests, show.split(requests, settings), strict=True):
        there = [(start, min(stop, request.seq_len - 1)) for start, stop in request.images]
        expected = image_mask(
            request.seq_len, there, window=settings.window, clamped=settings.clamped
        ).numpy()[request.begin :]
        np.testing.assert_array_equal(show.attention_mask(request, settings), expected)

        # A kernel's: keys of the segment, of causal ones up to the query, less than a window away
        # on both sides of where the query is to it, of which the last is at the last key.
        attended = np.zeros_like(expected)
        key = np.arange(request.seq_len)
        for kind, (first, last), keys, window in segments:
            for query in range(first, last + 1):
                position = keys[1] - (last - query)
                visible = key <= (position if kind == "causal" else keys[1])
                visible &= np.abs(key - position) < (window or request.seq_len)
                attended[query - request.begin] |= visible
        np.testing.assert_array_equal(attended, expected)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("12", "'12' is no request: it must read QUERY/SEQ"),
        ("a/b", "'a/b' is no request"),
        ("4/9:", "'4/9:' is no request"),
        ("4/9:3", "'4/9:3' is no request"),
        ("4/9:3-5;7-8", "is no request"),
        ("-- -1/9", "'-1/9' is no request"),
        ("9/4", "9/4: 9 queries of 4 tokens cannot be"),
        ("0/4", "0/4: 0 queries of 4 tokens cannot be"),
        ("9/9:5-3", "image 5-3 ends before it starts"),
        ("9/9:1-4,4-6", "image 4-6 overlaps the image before it"),
        ("9/9:5-8,1-6", "image 5-8 overlaps the image before it"),
        ("100000/100000", "the mask is too large to draw"),
        ("4/9 --window 0", "A sliding window of 0 tokens sees nothing"),
        ("4/9 --unclamped", "give --window W too"),
        ("4/9 --speculative-tokens=-1", "-1 speculative tokens cannot be"),
        ("1/3 " * 25 + "--png mask.png", "A picture holds 24 requests and 25 were given."),
        ("1/3 --png /nowhere/mask.png", "/nowhere/mask.png cannot be written: No such file"),
    ],
)
def test_what_makes_no_batch_is_refused_with_a_sentence(arguments: str, sentence: str) -> None:
    assert sentence in refused(arguments)


@pytest.mark.parametrize(
    "requests",
    ["12/12:3-6", "8/20:16-30 8/8 4/9:2-7 30/60:20-50 12/12:0-3,4-11 1/30:2-29"],
    ids=["one", "six"],
)
def test_the_picture_has_each_kind_of_cell_in_its_colour(
    requests: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    file = tmp_path / "mask.png"
    assert str(file) in shown(capsys, f"{requests} --window 6 --png {file}")
    pixels = imread(file)[..., :3]
    for color in (*show.COLORS.values(), show.IMAGE_TOKENS):
        share = (np.abs(pixels - np.array(to_rgb(color))).max(-1) < 0.01).mean()
        assert share > 1e-3, color


def test_a_pictures_pixels_are_the_mask() -> None:
    """Rows 1-3 of an image of four tokens see each other; row 0, text, sees itself alone."""
    requests, settings = [Request(5, 5, ((1, 3),))], Settings()
    figure = show.draw(requests, settings, "", show.split(requests, settings))
    (cells,) = figure.axes[0].get_images()
    hidden, causal, opened = range(3)
    assert cells.get_array().tolist() == [
        [causal, hidden, hidden, hidden, hidden],
        [causal, causal, opened, opened, hidden],
        [causal, causal, causal, opened, hidden],
        [causal, causal, causal, causal, hidden],
        [causal, causal, causal, causal, causal],
    ]


def test_without_matplotlib_a_picture_is_refused_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "--png needs matplotlib" in refused(f"1/3 --png {tmp_path}/mask.png")


def test_the_examples_in_help_are_requests(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parser().parse_args(["--help"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    examples = [line[0] for line in lines if line and line[0][0].isdigit()]
    assert list(map(show.parse_request, examples)) == [
        Request(12, 12, ((3, 6), (8, 11))),
        Request(1, 40, ((3, 6),)),
        Request(8, 20, ((16, 30),)),
        Request(4, 40, prefilling=True),
    ]


def test_adding_the_arguments_imports_no_backend_and_no_matplotlib() -> None:
    code = (
        "import argparse, sys, vllm.plugins;"
        "of_vllm = set(sys.modules);"  # with 0.30 some of it is there already
        "from vllm.plugins.composite_attention import show;"
        "show.add_arguments(argparse.ArgumentParser());"
        "print(*sys.modules.keys() - of_vllm)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = run.stdout.split()
    assert "vllm.plugins.composite_attention.show" in loaded
    heavy = ("matplotlib", "vllm.v1", "vllm.config", "transformers")
    assert [name for name in loaded if name.startswith(heavy)] == []
