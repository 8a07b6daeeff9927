"""`compute_mm_prefix_ranges`: which positions of which request an image mask covers."""

import gc
import weakref

import pytest
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.worker.gpu.attn_utils import compute_mm_prefix_ranges


def feature(
    offset: int, length: int, modality: str = "image", mask: str | None = None
) -> MultiModalFeatureSpec:
    """A feature whose placeholder starts at `offset`; `mask` marks its embeddings with `#`."""
    is_embed = None if mask is None else torch.tensor([token == "#" for token in mask])
    return MultiModalFeatureSpec(
        data=None,
        modality=modality,
        identifier="hash",
        mm_position=PlaceholderRange(offset, length, is_embed),
    )


def test_image_is_its_placeholder_with_both_ends_inclusive() -> None:
    assert compute_mm_prefix_ranges(["a"], {"a": [feature(3, 4)]}) == {0: [(3, 6)]}


def test_video_counts_like_an_image() -> None:
    assert compute_mm_prefix_ranges(["a"], {"a": [feature(3, 4, "video")]}) == {0: [(3, 6)]}


def test_audio_never_counts() -> None:
    features = {"a": [feature(0, 9, "audio"), feature(20, 2)]}
    assert compute_mm_prefix_ranges(["a"], features) == {0: [(20, 21)]}


def test_tokens_between_embeddings_split_an_image() -> None:
    features = {"a": [feature(10, 8, mask=".##.###.")]}
    assert compute_mm_prefix_ranges(["a"], features) == {0: [(11, 12), (14, 16)]}


def test_ranges_are_found_by_the_index_of_the_request() -> None:
    features = {"b": [feature(1, 2)], "a": [feature(5, 3), feature(9, 1)]}
    assert compute_mm_prefix_ranges(["a", "text", "b"], features) == {
        0: [(5, 7), (9, 9)],
        1: [],
        2: [(1, 2)],
    }


def test_request_with_an_empty_feature_list_has_no_ranges() -> None:
    assert compute_mm_prefix_ranges(["a"], {"a": []}) == {0: []}


def test_no_requests_give_no_entries() -> None:
    assert compute_mm_prefix_ranges([], {"a": [feature(1, 2)]}) == {}


def test_image_as_long_as_the_window_stays_and_a_longer_one_goes() -> None:
    features = {"a": [feature(0, 4), feature(10, 5)]}
    assert compute_mm_prefix_ranges(["a"], features, sliding_window=4) == {0: [(0, 3)]}


def test_window_is_compared_with_each_part_of_a_split_image() -> None:
    features = {"a": [feature(0, 8, mask="##.#####")]}
    assert compute_mm_prefix_ranges(["a"], features, sliding_window=4) == {0: [(0, 1)]}


def test_clamping_layers_keep_images_longer_than_the_window() -> None:
    ranges = compute_mm_prefix_ranges(
        ["a"], {"a": [feature(10, 5)]}, sliding_window=4, clamp_sliding_window=True
    )
    assert ranges == {0: [(10, 14)]}


@pytest.mark.parametrize(
    ("offset", "start"),
    [(8, 11), (9, 11), (11, 11), (12, 15)],  # the next position that is 3 modulo 4
)
def test_padded_span_starts_at_its_last_padding_token(offset: int, start: int) -> None:
    features = {"a": [feature(offset, 20, mask="." * 20)]}
    ranges = compute_mm_prefix_ranges(["a"], features, span_pad=4)
    assert ranges == {0: [(start, offset + 19)]}


def test_window_is_compared_with_the_padded_span() -> None:
    features = {"a": [feature(8, 20)]}  # 11 .. 27
    assert compute_mm_prefix_ranges(["a"], features, 16, span_pad=4) == {0: []}
    assert compute_mm_prefix_ranges(["a"], features, 17, span_pad=4) == {0: [(11, 27)]}


def test_image_without_a_position_is_refused_by_request_and_number() -> None:
    broken = feature(0, 1)
    object.__setattr__(broken, "mm_position", None)
    with pytest.raises(ValueError, match=r"Feature 1 \(image\) of request 'a' has no mm_position"):
        compute_mm_prefix_ranges(["a"], {"a": [feature(0, 1, "audio"), broken]})


def test_audio_without_a_position_is_nobody_s_business() -> None:
    broken = feature(0, 1, "audio")
    object.__setattr__(broken, "mm_position", None)
    assert compute_mm_prefix_ranges(["a"], {"a": [broken]}) == {0: []}


def test_caller_may_change_what_it_was_given() -> None:
    features = {"a": [feature(10, 3, mask=".##")]}
    compute_mm_prefix_ranges(["a"], features)[0].append((99, 99))
    assert compute_mm_prefix_ranges(["a"], features) == {0: [(11, 12)]}


def test_one_mask_at_two_places_gives_two_ranges() -> None:
    mask = torch.tensor([False, True, True])
    features = {
        "a": [
            MultiModalFeatureSpec(None, "image", "hash", PlaceholderRange(offset, 3, mask))
            for offset in (10, 20)
        ]
    }
    assert compute_mm_prefix_ranges(["a"], features) == {0: [(11, 12), (21, 22)]}


def test_mask_of_an_image_is_read_once_however_many_steps_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = []
    extract = PlaceholderRange.extract_embeds_range

    def counted(position: PlaceholderRange) -> list[tuple[int, int]]:
        read.append(position.offset)
        return extract(position)

    monkeypatch.setattr(PlaceholderRange, "extract_embeds_range", counted)
    features = {"a": [feature(10, 3, mask=".##"), feature(20, 3, mask="##.")]}
    for _ in range(3):
        compute_mm_prefix_ranges(["a"], features)
    assert read == [10, 20]


def test_what_is_remembered_of_an_image_goes_with_it() -> None:
    image = feature(10, 8, mask=".##.###.")
    position = weakref.ref(image.mm_position)
    compute_mm_prefix_ranges(["a"], {"a": [image]})
    del image
    gc.collect()
    assert position() is None


def test_an_image_asked_for_again_has_the_same_ranges() -> None:
    features = {"a": [feature(10, 8, mask=".##.###.")]}
    first = compute_mm_prefix_ranges(["a"], features)
    first[0].clear()
    assert compute_mm_prefix_ranges(["a"], features) == {0: [(11, 12), (14, 16)]}
