from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
from harness import Case, check, lower_model, make_model, whole

from hybridc.errors import UnsupportedError

POOL = {
    "pool_int64s": [2, 3, 5, 4, 5, 6, 7, 8, 6, 7, 1, 2, 3],
    "ngram_counts": [0, 4, 10],
    "ngram_indexes": [0, 1, 2, 3, 4, 5, 6, 7],
}
LENGTHS = [(1, 1), (1, 2), (2, 2), (1, 3), (2, 3), (3, 3)]
ROW = np.array([1, 1, 3, 3, 3, 7, 8, 6, 7, 5, 6, 8, 1, 2, 3, 4, 5], np.int64)
BATCH = np.concatenate([ROW, ROW[::-1], np.roll(ROW, 3)]).reshape(3, -1)


def case(data, low, high, skips=0, mode="TF", symbolic=None, **attributes):
    options = {"mode": mode, "min_gram_length": low, "max_gram_length": high}
    options |= {"max_skip_count": skips, **POOL, **attributes}
    return Case("TfIdfVectorizer", [data], options, symbolic=symbolic or {})


WEIGHTS = [0.5, 2.0, 3.0, 0.25, 1.5, 7.0, 4.0, 1.25]
CASES = [
    *(
        case(data, low, high, skips)
        for data in (ROW, BATCH, BATCH.astype(np.int32))
        for low, high in LENGTHS
        for skips in (0, 1, 5)
    ),
    *(
        case(BATCH, 1, 3, 2, mode, **({"weights": weights} if weights else {}))
        for mode in ("TF", "IDF", "TFIDF")
        for weights in (None, WEIGHTS)
    ),
    case(BATCH, 1, 2, 1, ngram_indexes=[3, 0, 2, 1, 9, 4, 6, 5]),
    case(BATCH, 1, 3, 1, symbolic={0: {0: "n", 1: "c"}}),
    case(ROW[:2], 3, 3, 1),
    case(whole(2, 200, dtype="int64", low=1, high=9), 2, 3, 3),
    replace(  # ONNX Runtime takes no n-gram twice
        case(
            *(ROW, 2, 2),
            pool_int64s=[6, 7, 5, 6, 6, 7],
            ngram_counts=[0, 0],
            ngram_indexes=[0, 1, 2],
        ),
        reference=True,
    ),
]


@pytest.mark.parametrize("one", CASES, ids=str)
def test_tf_idf(one):
    check(one)


def test_weights_of_columns_in_another_order_are_refused():
    """ONNX Runtime and the standard's text disagree about which n-gram a weight belongs to."""
    one = case(ROW, 1, 3, 0, "TFIDF", weights=WEIGHTS, ngram_indexes=[1, 0, 2, 3, 4, 5, 6, 7])
    model = make_model(one)
    onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    with pytest.raises(UnsupportedError, match="weights in another order"):
        lower_model(model)
