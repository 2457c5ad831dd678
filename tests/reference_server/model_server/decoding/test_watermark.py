import torch

from reference_server.model_server.decoding.watermark import Watermark

CPU = torch.device("cpu")


def test_model_server_M14_green_list_is_the_first_half_of_the_seeded_permutation():
    assert Watermark(gamma=0.5).green_ids(103, 10, CPU).tolist() == [5, 7, 9, 4, 8]


def test_gamma_is_the_fraction_of_the_vocabulary_rounded_down():
    assert len(Watermark(gamma=0.25).green_ids(103, 10, CPU)) == 2


def test_another_last_token_has_another_green_list():
    watermark = Watermark()

    assert watermark.green_ids(1, 100, CPU).tolist() != watermark.green_ids(2, 100, CPU).tolist()
