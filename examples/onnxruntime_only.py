"""Run a case directory of one chip in ONNX Runtime, without llmc.

`python examples/onnxruntime_only.py CASE_DIR`, compiled with `--target cpu --tp_size 1`.
"""

import sys

import numpy as np
import onnxruntime as ort


def main(case_dir: str) -> None:
    session = ort.InferenceSession(f"{case_dir}/chip0/graph.onnx")
    feed = {"input_ids": np.array([1, 2, 3]), "cu_seqlens": np.array([0, 3], np.int32),
            "past_lens": np.zeros(1, np.int32), "logits_indices": np.array([2])}
    for tensor in session.get_inputs():
        if "cache" in tensor.name:
            feed[tensor.name] = np.zeros((1, *tensor.shape[1:]), np.float32)
    logits, = session.run(["logits"], feed)
    print(logits.shape, logits[0].argmax())


if __name__ == "__main__":
    main(sys.argv[1])
