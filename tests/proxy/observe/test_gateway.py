"""What a gateway for inference and an autoscaler read of a cell."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


async def test_the_cell_is_the_sum_of_its_workers_that_decode(serve):
    figures = {"requests_running": 3, "requests_waiting": 2, "kv_blocks_used": 30, "kv_blocks_usable": 100}
    async with serve(encoders=0, decoders=0) as rig:
        await rig.cluster.add_decoder(figures={**figures, "outstanding_work_seconds": 1.5})
        await rig.cluster.add_decoder(figures={**figures, "kv_blocks_used": 10, "outstanding_work_seconds": 2.5})
        await rig.cluster.add_prefill(figures=figures)
        await rig.wait_for_workers()
        text = (await rig.http.get("/metrics")).text
        assert rig.count("outstanding_work_seconds", role="prefill_decode") == 4.0
        assert rig.count("outstanding_work_seconds", role="encoder") == 0.0
    families = [*text_string_to_metric_families(text)]
    found = {one.name: one for family in families for one in family.samples if one.name.startswith("vllm:")}
    assert {one.labels["model_name"] for one in found.values()} == {"signpost"}
    assert found["vllm:num_requests_running"].value == 6
    assert found["vllm:num_requests_waiting"].value == 4
    assert found["vllm:kv_cache_usage_perc"].value == 0.2
    cache = found["vllm:cache_config_info"].labels
    assert (cache["block_size"], cache["num_gpu_blocks"]) == ("16", "200")


async def test_an_empty_cell_has_numbers_too(serve):
    async with serve(encoders=0, decoders=0) as rig:
        text = (await rig.http.get("/metrics")).text
    assert 'vllm:kv_cache_usage_perc{model_name="signpost"} 0.0' in text
