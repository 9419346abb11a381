"""Which prompts are taken for alike, and what is remembered of them."""

from __future__ import annotations

from common.messages import InputSlot
from common.sampling_params import SamplingParams
from proxy.dispatch.affinity import CHUNK_TOKENS, MAX_CHUNKS, AffinityMap, cache_keys
from proxy.dispatch.jobs import Job


def _job(tokens: list[int], *slots: InputSlot) -> Job:
    return Job("r", tokens, SamplingParams(), list(slots))


def _picture(content: str, place: int | None) -> InputSlot:
    return InputSlot(0, "image", content, place)


def test_prompts_that_begin_alike_share_the_keys_of_their_common_chunks():
    start = list(range(2 * CHUNK_TOKENS))
    one, two = cache_keys(_job([*start, *[1] * CHUNK_TOKENS])), cache_keys(_job([*start, *[2] * CHUNK_TOKENS]))
    assert len(one) == len(two) == 3
    assert one[0] != two[0]
    assert one[1:] == two[1:]  # the most telling key stands first
    assert len(set(one)) == 3


def test_a_prompt_shorter_than_a_chunk_has_no_key():
    assert cache_keys(_job([1] * (CHUNK_TOKENS - 1))) == []


def test_another_picture_makes_another_prompt_from_where_it_stands():
    tokens = [7] * (3 * CHUNK_TOKENS)
    red, blue = (cache_keys(_job(tokens, _picture(content, CHUNK_TOKENS))) for content in ("red", "blue"))
    assert red[2] == blue[2]  # the first chunk is before the picture
    assert red[0] != blue[0]
    assert red[1] != blue[1]
    assert (red[3], blue[3]) == (b"red", b"blue")


def test_what_cross_attention_reads_is_part_of_every_chunk():
    tokens = [7] * CHUNK_TOKENS
    one, two = (cache_keys(_job(tokens, _picture(content, None))) for content in ("a", "b"))
    assert one[0] != two[0]


def test_very_long_prompts_have_a_bounded_number_of_keys():
    assert len(cache_keys(_job([1] * (MAX_CHUNKS + 10) * CHUNK_TOKENS))) == MAX_CHUNKS


def test_the_most_telling_known_key_of_a_live_instance_wins():
    memory = AffinityMap()
    memory.remember([b"long", b"short"], "a")
    memory.remember([b"short"], "b")
    assert memory.find([b"long", b"short"], ["a", "b"]) == "a"
    assert memory.find([b"long", b"short"], ["b"]) == "b"
    assert memory.find([b"other"], ["a", "b"]) is None


def test_the_least_recently_used_key_is_forgotten_first():
    memory = AffinityMap(max_keys=2)
    memory.remember([b"x", b"y"], "a")
    memory.remember([b"x"], "a")
    memory.remember([b"z"], "a")
    assert len(memory) == 2
    assert memory.find([b"y"], ["a"]) is None
    assert memory.find([b"x"], ["a"]) == "a"


def test_a_map_of_many_keys_keeps_nearly_all_of_the_latest_and_never_grows():
    memory = AffinityMap(max_keys=1000)
    for number in range(10_000):
        memory.remember([b"key %d" % number], f"instance {number % 3}")
    kept = [
        number
        for number in range(9_500, 10_000)
        if memory.find([b"key %d" % number], ["instance 0", "instance 1", "instance 2"])
    ]
    assert len(kept) > 450  # half of what there is room for: few sets of eight have had more
    assert all(memory.find([b"key %d" % number], [f"instance {number % 3}"]) for number in kept)
    assert len(memory) == 1000
