import pytest

from drivetrain_tracking import plain_config
from drivetrain_tracking.values.secret_masking import is_secret_name, mask_command, mask_config, mask_text

SECRETS = (
    "password DB_PASSWORD api_key apiKey wandb_api_key --hf-token token accessToken aws_secret_access_key "
    "credentials privateKey hub_token client-secret MLFLOW_TRACKING_TOKEN DVC_STUDIO_TOKEN wandb_key openai_key "
    "ssh_key pwd authorization api_keys access_tokens"
)
OTHERS = (
    "pad_token eos_token_id num_tokens max_new_tokens tokenizer key num_key_value_heads author secretary passes keys "
    "token_type mask_token primary_key image_key sort_keys loss_per_token image_token max_tokens"
)


@pytest.mark.parametrize("name", SECRETS.split())
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", OTHERS.split())
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


def test_objects_of_other_kinds_are_masked() -> None:
    attrs = pytest.importorskip("attrs")
    omegaconf = pytest.importorskip("omegaconf")

    @attrs.define
    class Hub:
        api_key: str
        repo: str

    class Login:
        def __str__(self) -> str:
            return "Login(user='me', api_key='abc def', retries=3)"

    config = {
        "hub": Hub("abcd", "me/model"),
        "login": Login(),
        "environment": ["API_KEY=abcdef", "LEVEL=debug"],
        "listed": omegaconf.OmegaConf.create([{"password": "1234"}, 1]),
    }
    assert plain_config(config) == {
        "hub": {"api_key": "***", "repo": "me/model"},
        "login": "Login(user='me', api_key='***', retries=3)",
        "environment": ["API_KEY=***", "LEVEL=debug"],
        "listed": [{"password": "***"}, 1],
    }


def test_a_command_line_is_masked() -> None:
    command = "python train.py --api-key abc --hub-token=xyz --lr 0.1 --pad-token <pad>"
    masked = "python train.py --api-key *** --hub-token=*** --lr 0.1 --pad-token <pad>"
    assert mask_command(command.split()) == masked.split()


def test_a_text_is_masked() -> None:
    assert mask_text("train --api-key abcd --lr 0.1") == "train --api-key *** --lr 0.1"
    assert mask_text("Authorization: Bearer abc.def-ghi") == "Authorization: ***"
    assert mask_text("password = 'two words' # end") == "password = '***' # end"
    text = '+API_KEY = "abcdef"\n+pad_token = "<pad>"\n'
    key = "+-----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY-----\n"
    assert mask_text(text + key) == '+API_KEY = "***"\n+pad_token = "<pad>"\n+***\n'


@pytest.mark.timeout(20)
@pytest.mark.parametrize("part", ["x", "x.", "--a", "a=b ", "password ", "://", "-----BEGIN ", "Bearer "])
@pytest.mark.default_cases("a=b ", "Bearer ")
def test_long_texts_are_masked_in_a_time_that_grows_with_their_length(part: str) -> None:
    text = part * (1_000_000 // len(part))
    assert mask_text(text) == text
