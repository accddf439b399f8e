"""What an engine logs about itself."""

import torch

from deepspeed.config import parse
from deepspeed.engine.reports import state_text


def test_the_state_shows_functions_of_the_configuration_as_text():
    optimizer = {"type": "SGD", "params": {"lr": 0.5}}
    scheduler = {"type": "LambdaLR", "params": {"lr_lambda": [abs]}}
    root = parse({"train_batch_size": 8, "optimizer": optimizer, "scheduler": scheduler}).root
    text = state_text(root, torch.device("cpu"), [], [])
    assert '"lr": 0.5' in text and str(abs) in text and '"train_batch_size": 8' in text


def test_the_state_shows_no_secret():
    root = parse({"train_batch_size": 8, "comet": {"enabled": True, "api_key": "hidden", "project": "shown"}}).root
    text = state_text(root, torch.device("cpu"), [], [])
    assert "shown" in text and "hidden" not in text
