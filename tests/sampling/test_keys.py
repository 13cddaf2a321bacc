import ast
import copy
import os
import pickle
import threading

import numpy as np
import pytest

from tf_adadp.sampling.keys import LotKey, StepCounter

GOLDEN = [7166116094887804899, 16014198745677181535]


def draw(key, step):
    return key.generator(step).bit_generator.random_raw(2).tolist()


def test_a_step_of_a_seed_is_the_same_for_ever():
    # Philox's raw stream is guaranteed by numpy; the golden values pin our derivation of the key.
    assert draw(LotKey(7), 3) == GOLDEN
    assert draw(LotKey(np.int64(7)), 3) == GOLDEN


def test_steps_and_seeds_differ():
    draws = [tuple(draw(LotKey(seed), step)) for seed in (-1, 0, 1, 10) for step in (0, 1, 2**62)]
    assert len(set(draws)) == len(draws)


def test_the_streams_of_neighbouring_steps_do_not_overlap():
    # A step is no offset into one stream: 10^5 outputs of step 0 hold none of step 1's first.
    first = LotKey(7).generator(0).bit_generator.random_raw(100_000)
    assert not np.isin(draw(LotKey(7), 1), first).any()


@pytest.mark.parametrize("again", [copy.deepcopy, lambda key: pickle.loads(pickle.dumps(key))])
def test_copies_of_a_secret_key_are_new_keys(again):
    assert draw(again(LotKey()), 0) != draw(LotKey(), 0)
    secret = LotKey()
    assert draw(again(secret), 0) != draw(secret, 0)
    assert draw(again(LotKey(7)), 3) == GOLDEN


def test_a_secret_key_is_in_no_text_or_pickle():
    key = LotKey()
    secret = key._key
    assert secret.bit_length() > 90  # fails by chance once in 2^37
    for text in (repr(key), str(key), f"{key}", repr([key])):
        assert str(secret) not in text
        assert f"{secret:x}" not in text
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        stored = pickle.dumps(key, protocol)
        assert secret.to_bytes(16, "little") not in stored
        assert str(secret).encode() not in stored


@pytest.mark.parametrize("seed", [True, 1.0, "1", b"1"])
def test_a_seed_that_is_no_integer_is_refused(seed):
    with pytest.raises(TypeError, match=f"seed={seed!r}: give an integer .*, or None"):
        LotKey(seed)


def test_the_counter_hands_out_every_index_once():
    counter = StepCounter(5)
    taken = []

    def work():
        for _ in range(500):
            first = counter.claim(3)
            taken.extend(range(first, first + 3))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(5, 5 + 8 * 500 * 3))
    assert counter.next == 5 + 8 * 500 * 3


def test_the_counter_only_moves_forward():
    counter = StepCounter()
    counter.advance_to(4)
    counter.advance_to(4)
    assert counter.claim() == 4
    with pytest.raises(ValueError, match="cannot go back from 5 to 4"):
        counter.advance_to(4)
    assert pickle.loads(pickle.dumps(counter)).next == 5


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_draws_lots_of_its_own():
    secret, seeded = LotKey(), LotKey(7)
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writable, repr([draw(secret, 0), draw(secret, 0), draw(seeded, 3)]).encode())
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as answer:
        first, again, golden = ast.literal_eval(answer.read())
    os.waitpid(child, 0)
    assert first == again != draw(secret, 0)
    assert golden == GOLDEN
