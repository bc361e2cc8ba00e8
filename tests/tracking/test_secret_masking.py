import pytest

from drivetrain_tracking.secret_masking import is_secret_name, mask_command, mask_config, mask_text


@pytest.mark.parametrize(
    "name",
    [
        *(
            "password",
            "DB_PASSWORD",
            "api_key",
            "apiKey",
            "wandb_api_key",
            "--hf-token",
            "token",
            "accessToken",
        ),
        *("aws_secret_access_key", "credentials", "privateKey", "hub_token", "client-secret"),
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "pad_token",
            "eos_token_id",
            "num_tokens",
            "max_new_tokens",
            "tokenizer",
            "key",
            "num_key_value_heads",
        ),
        *("author", "secretary", "passes", "keys", "token_type", "mask_token", "primary_key"),
    ],
)
def test_names_of_other_things(name: str) -> None:
    assert not is_secret_name(name)


def test_a_configuration_is_masked_at_any_depth_by_name_and_by_form() -> None:
    config = {
        "lr": 0.1,
        "hub": {"token": "abc", "repo": "me/model"},
        "stores": [{"password": "1234", "url": "s3://user:pass@host/x"}],
        "note": "use hf_abcdefghijklmnopqrstuvwx please",
        "use_token": True,
        "api_key": None,
    }
    assert mask_config(config) == {
        "lr": 0.1,
        "hub": {"token": "***", "repo": "me/model"},
        "stores": [{"password": "***", "url": "s3://***@host/x"}],
        "note": "use *** please",
        "use_token": True,
        "api_key": None,
    }


def test_a_command_line_is_masked() -> None:
    command = [
        "python",
        "train.py",
        "--api-key",
        "abc",
        "--hub-token=xyz",
        "--lr",
        "0.1",
        "--pad-token",
        "<pad>",
    ]
    assert mask_command(command) == [
        *("python", "train.py", "--api-key", "***", "--hub-token=***", "--lr", "0.1", "--pad-token", "<pad>"),
    ]


def test_a_text_is_masked() -> None:
    text = '+API_KEY = "abcdef"\n+pad_token = "<pad>"\n'
    key = "+-----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY-----\n"
    assert mask_text(text + key) == '+API_KEY = "***"\n+pad_token = "<pad>"\n+***\n'
