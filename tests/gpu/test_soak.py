"""2,000 short requests, some aborted: host and GPU memory are stable."""

import gc

import families
import pytest
import torch
from soaking import soak

import llmc


@pytest.mark.parametrize("backend", [None, "vanilla"])
def test_2000_requests_leak_nothing(extension, tmp_path, backend):
    hf = families.save(families.tiny_model("llama", vocab_size=256), tmp_path / "hf")
    llmc.compile(hf, tmp_path / "case", target="cuda", dtype="bfloat16", max_seq_len=64)
    with llmc.LLM(tmp_path / "case", kv_cache_tokens=1024, max_batch_size=32,
                  attention_backend=backend) as llm:
        soak(llm, 200)
        free = torch.cuda.mem_get_info()[0]
        finished, sizes = soak(llm, 200)
        assert torch.cuda.mem_get_info()[0] >= free
    assert finished > 1500
    assert sizes[-1] < 1.02 * sizes[4]


def test_closing_frees_the_device_for_the_next_model(extension, tmp_path):
    hf = families.save(families.tiny_model("llama", vocab_size=256), tmp_path / "hf")
    llmc.compile(hf, tmp_path / "case", target="cuda", dtype="bfloat16", max_seq_len=64)
    gc.disable()  # it would free cycles some time later
    try:
        for _ in range(2):  # what the first one leaves is the process's
            before = torch.cuda.mem_get_info()[0]
            with llmc.LLM(tmp_path / "case", kv_cache_tokens=2**20) as llm:
                llm.generate([[5, 6, 7]] * 4, llmc.SamplingParams(max_tokens=5, n=2))
                during = torch.cuda.mem_get_info()[0]
            after = torch.cuda.mem_get_info()[0]
        assert before - during > 2**27 and after - during > 0.9 * (before - during)
    finally:
        gc.enable()
