"""Every case of the prompt kernels' bench runs, and says how many bytes it moves."""

import pytest
import torch
from kernarc.decoder.bench import prefill as prefill_bench


def test_every_case_runs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_bench, "CARD", torch.device(device))
    if device == "cpu":  # no bf16 in the interpreter, and no patience for the 27B's matrices
        monkeypatch.setattr(prefill_bench, "BF16", torch.float16)
        monkeypatch.setattr(prefill_bench, "PRODUCTS", {"small": (256, 512)})
    rows = 8192 if device == "cuda" else 4
    names = set()
    with torch.inference_mode():
        for case in prefill_bench.row_cases(rows):
            case.call(0)
            assert case.num_bytes > rows * 1000, case.name
            names.add(case.name)
        for case, operations in prefill_bench.matrix_cases(rows):
            case.call(0)
            assert operations > 0 or case.name.startswith("unpack"), case.name
            names.add(case.name)
    assert len(names) >= 13
