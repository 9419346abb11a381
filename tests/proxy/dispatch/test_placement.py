"""Choice of workers: by load, by affinity, and the keys by which prompts count as alike."""

from __future__ import annotations

from collections import Counter
from unittest.mock import Mock

from common.messages import InputSlot, InstanceRecord, Role
from common.sampling_params import SamplingParams
from proxy.dispatch.jobs import CHUNK_TOKENS, MAX_CHUNKS, Job, cache_keys
from proxy.dispatch.placement import AffinityMap, Placement, better, imbalance, pick_decoder, pick_encoder
from proxy.dispatch.worker import Load, Worker


def _worker(
    name: str,
    requests: int = 0,
    tokens: int = 0,
    items: int = 0,
    outstanding: int = 0,
    outstanding_tokens: int = 0,
    role: Role = "encoder",
) -> Worker:
    record = InstanceRecord(
        instance_id=name,
        role=role,
        epoch=1,
        model="m",
        fingerprint="f",
        dtype="float32",
        http_address="",
        requests_address="",
        outstanding=outstanding,
        outstanding_tokens=outstanding_tokens,
    )
    return Worker(record, Mock(), Load(requests, tokens, items))


def test_the_least_loaded_decoder_is_picked_by_tokens_then_requests():
    short, long = _worker("b", 2, 10), _worker("a", 1, 500)
    assert pick_decoder([long, short]) == (short, "unknown")
    one, two = _worker("b", 1, 10), _worker("a", 2, 10)
    assert pick_decoder([two, one]) == (one, "unknown")


def test_other_proxies_work_counts_too():
    busy_elsewhere, ours = _worker("a", outstanding_tokens=50), _worker("b", 2, 10)
    assert pick_decoder([busy_elsewhere, ours])[0] is ours
    busy_elsewhere, ours = _worker("a", outstanding=5), _worker("b", 2)
    assert pick_decoder([busy_elsewhere, ours])[0] is ours


def test_a_cached_prompt_goes_where_it_is_cached():
    idle, home = _worker("a"), _worker("b", 3, 300)
    assert pick_decoder([idle, home], home) == (home, "hit")


def test_a_cached_prompt_goes_elsewhere_when_its_instance_has_over_its_share():
    idle, home = _worker("a", 4, 100), _worker("b", 4, 170)
    assert pick_decoder([idle, home], home) == (idle, "overloaded")
    home = _worker("b", 4, 160)
    assert pick_decoder([idle, home], home) == (home, "hit")


def test_a_pair_takes_what_its_busier_half_has_less_of_than_a_whole_instance():
    whole, idle, busy = Placement(_worker("pd", tokens=100), "hit"), _worker("p", tokens=10), _worker("d", tokens=120)
    pair = Placement(_worker("d", tokens=90), "hit", idle)
    assert better(whole, pair) is pair
    for decoder, prefiller in ((busy, idle), (idle, busy)):
        assert better(whole, Placement(decoder, "hit", prefiller)) is whole


def test_imbalance_is_the_busiest_over_the_mean():
    assert imbalance([]) == imbalance([_worker("a"), _worker("b")]) == 1.0
    decoders = [_worker("a", tokens=30, items=1, role="decode"), _worker("b", tokens=10, role="decode")]
    assert imbalance(decoders) == 1.5


def test_imbalance_of_encoders_is_that_of_their_items():
    assert imbalance([_worker("a", items=6), _worker("b", items=2)]) == 1.5
    assert imbalance([_worker("a", items=2), _worker("b", outstanding=4), _worker("c")]) == 2.0


def test_content_stays_with_its_encoder_when_others_come_and_go():
    workers = [_worker(f"e{index}") for index in range(4)]
    keys = [f"hash{index}" for index in range(200)]
    homes = {key: pick_encoder(key, workers)[0] for key in keys}
    counts = Counter(worker.instance_id for worker in homes.values())
    assert min(counts.values()) > 25  # spread over all
    without_last = {key: pick_encoder(key, workers[:3])[0] for key in keys}
    assert all(without_last[key] is homes[key] for key in keys if homes[key] is not workers[3])


def test_an_encoder_over_its_share_is_passed_over():
    home, affinity = pick_encoder("x", [_worker("e0"), _worker("e1")])
    assert affinity == "hit"
    workers = [_worker(name, items=20 if name == home.instance_id else 0) for name in ("e0", "e1")]
    elsewhere, affinity = pick_encoder("x", workers)
    assert affinity == "overloaded"
    assert elsewhere.instance_id != home.instance_id


def test_what_an_encoder_has_from_other_proxies_counts_too():
    home, _ = pick_encoder("x", [_worker("e0"), _worker("e1")])
    for outstanding, picks_home in ((3, True), (20, False)):
        workers = [
            _worker(name, items=1, outstanding=outstanding if name == home.instance_id else 0) for name in ("e0", "e1")
        ]
        picked, affinity = pick_encoder("x", workers)
        assert (picked.instance_id == home.instance_id) is picks_home
        assert affinity == ("hit" if picks_home else "overloaded")


def test_avoided_encoders_are_used_only_where_there_is_no_other():
    one, two = _worker("e0"), _worker("e1")
    home, _ = pick_encoder("x", [one, two])
    other = two if home is one else one
    assert pick_encoder("x", [one, two], avoid={home.instance_id}) == (other, "avoided")
    assert pick_encoder("x", [one, two], avoid={other.instance_id}) == (home, "hit")
    assert pick_encoder("x", [one], avoid={"e0"}) == (one, "hit")


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
    memory, a, b = AffinityMap(), _worker("a"), _worker("b")
    memory.remember([b"long", b"short"], "a")
    memory.remember([b"short"], "b")
    assert memory.find([b"long", b"short"], [a, b]) is a
    assert memory.find([b"long", b"short"], [b]) is b
    assert memory.find([b"other"], [a, b]) is None


def test_the_least_recently_used_key_is_forgotten_first():
    memory, a = AffinityMap(max_keys=2), _worker("a")
    memory.remember([b"x", b"y"], "a")
    memory.remember([b"x"], "a")
    memory.remember([b"z"], "a")
    assert sum(map(bool, memory._instances)) == 2
    assert memory.find([b"y"], [a]) is None
    assert memory.find([b"x"], [a]) is a


def test_a_map_of_many_keys_keeps_nearly_all_of_the_latest_and_never_grows():
    memory, workers = AffinityMap(max_keys=1000), [_worker(f"instance {number}") for number in range(3)]
    for number in range(10_000):
        memory.remember([b"key %d" % number], f"instance {number % 3}")
    kept = [number for number in range(9_500, 10_000) if memory.find([b"key %d" % number], workers)]
    assert len(kept) > 450  # half of what there is room for: few sets of eight have had more
    assert all(memory.find([b"key %d" % number], [workers[number % 3]]) for number in kept)
    assert sum(map(bool, memory._instances)) == 1000


def test_prompts_with_different_adapters_have_nothing_in_common_and_equal_ones_meet():
    tokens = [1] * CHUNK_TOKENS
    plain, one, two = (
        cache_keys(Job("r", tokens, SamplingParams(adapter=adapter))) for adapter in ("", "verse", "prose")
    )
    assert len(plain) == 1
    assert not {*plain} & {*one}
    assert not {*one} & {*two}
    [short] = cache_keys(Job("r", [2], SamplingParams(adapter="verse")))
    assert one[-1] == short, "the adapter itself: it is in the memory of one worker already"
