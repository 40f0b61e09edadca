import pytest

from overlapctl.cli.environment_checks import check_environment
from overlapctl.reports.checks import Status


def by_name(**variables):
    return {check.name: check for check in check_environment(variables)}


def test_the_default_number_of_connections_is_told():
    check = by_name()["CUDA_DEVICE_MAX_CONNECTIONS"]
    assert (check.status, check.value[0]) == (Status.PASS, "8")


@pytest.mark.parametrize(
    ("value", "status", "words"),
    [
        ("1", Status.WARN, "one queue"),
        ("32", Status.PASS, "32"),
        ("64", Status.WARN, "no number from 1 to 32"),
        ("many", Status.WARN, "no number from 1 to 32"),
        ("", Status.WARN, "no number from 1 to 32"),
    ],
)
def test_connections(value, status, words):
    check = by_name(CUDA_DEVICE_MAX_CONNECTIONS=value)["CUDA_DEVICE_MAX_CONNECTIONS"]
    assert check.status is status
    assert words in check.value
    assert bool(check.remedy) == (status is not Status.PASS)


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", Status.FAIL),
        ("CUDA_LAUNCH_BLOCKING", "0", Status.PASS),
        ("NCCL_MAX_CTAS", "8", Status.WARN),
        ("NCCL_MAX_NCHANNELS", "8", Status.WARN),
        ("NCCL_ALGO", "Ring", Status.WARN),
        ("NCCL_DEBUG", "INFO", Status.PASS),
        ("TORCH_NCCL_AVOID_RECORD_STREAMS", "1", Status.PASS),
        ("OVERLAPCTL_DISABLE", "1", Status.WARN),
        ("OVERLAPCTL_DISABLE", "0", Status.PASS),
    ],
)
def test_variables_that_matter(name, value, status):
    check = by_name(**{name: value})[name]
    assert check.status is status
    assert value in check.value


def test_others_are_not_listed():
    assert set(by_name(HOME="/root", CUDA_VISIBLE_DEVICES="0")) == {"CUDA_DEVICE_MAX_CONNECTIONS"}
