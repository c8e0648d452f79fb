"""What holds training up, from parts of a step and loads of hosts."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.records.measurement import PARTS, TimeParts
from outpace.records.utilisation import DeviceLoad, HostLoad, Load
from outpace.reporting.bottleneck import Bottleneck, BottleneckInputs, bottleneck


def told(
    parts: dict[str, float], loads: tuple[Load, ...] = (), device: str = "cuda", **more: Any
) -> Bottleneck:
    values = {"strategy": "ddp", "processes": 2, **more}
    found = bottleneck(
        BottleneckInputs(
            TimeParts(**{f"{k}_s": v for k, v in parts.items()}), device, loads=loads, **values
        )
    )
    assert found is not None
    return found


def gpus(*shares: float | None, run_memory: int | None = 2**30) -> tuple[Load, ...]:
    devices = tuple(
        DeviceLoad(index=at, name="G", utilisation=share, run_memory_bytes=run_memory)
        for at, share in enumerate(shares)
    )
    return (Load(duration_s=1.0, devices=devices, host=HostLoad()),)


def cores(*shares: float, run_cores: float | None) -> tuple[Load, ...]:
    return (Load(duration_s=1.0, host=HostLoad(cores=shares, run_cores=run_cores)),)


COMPUTING = {"forward": 1.0, "backward": 2.0}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (COMPUTING, "compute-bound"),
        ({**COMPUTING, "data": 0.5}, "compute-bound"),  # a seventh
        ({**COMPUTING, "data": 1.0}, "waits for data 25 %"),
        ({**COMPUTING, "communication": 2.0}, "communication 40 %"),
        ({**COMPUTING, "optimizer": 1.0, "communication": 0.9}, "optimizer 20 %"),
        ({**COMPUTING, "data": 3.0, "communication": 3.1}, "communication 34 %"),
    ],
)
def test_the_largest_part_that_is_no_computing_is_told(parts: dict[str, float], words: str) -> None:
    assert told(parts).words == words


@given(
    st.fixed_dictionaries({part: st.floats(0.01, 10) for part in PARTS}),
    st.sampled_from([2.0**-10, 8.0]),  # exact, so that nothing is rounded otherwise
)
def test_it_does_not_depend_on_how_long_steps_are(parts: dict[str, float], scale: float) -> None:
    longer = {part: scale * seconds for part, seconds in parts.items()}
    assert told(longer).advice == told(parts).advice


def test_a_gpu_that_idles_though_nothing_waits_for_data_waits_for_the_host() -> None:
    assert told(COMPUTING, gpus(0.5, 0.6)).words == "host-bound: GPU 55 % busy"
    assert told(COMPUTING, gpus(0.9, 0.95)).words == "compute-bound"
    assert told({**COMPUTING, "data": 1.2}, gpus(0.7)).words == "waits for data 29 %"


def test_nothing_is_said_of_gpus_of_which_it_is_not_known_whose_they_are() -> None:
    assert told(COMPUTING, gpus(0.5, 0.0, 0.0, run_memory=None)).words == "compute-bound"
    assert told(COMPUTING, gpus(0.5, 0.5, run_memory=None)).words == "host-bound: GPU 50 % busy"
    assert told(COMPUTING, gpus(0.5, None)).words == "compute-bound"
    assert told(COMPUTING, gpus(0.0, 0.0, run_memory=0)).words == "compute-bound"  # not the run's


def test_on_a_cpu_cores_may_idle_or_be_others() -> None:
    def of(loads: tuple[Load, ...], **parts: float) -> str:
        return told({**COMPUTING, **parts}, loads, device="cpu").words

    assert of(cores(1.0, 0.1, run_cores=1.1)) == "cores 55 % busy"
    assert of(cores(1.0, 0.9, run_cores=1.9)) == "compute-bound"
    assert of(cores(1.0, 1.0, run_cores=1.2)) == "others use 40 % of the cores"
    assert of(cores(1.0, 1.0, run_cores=None)) == "compute-bound"
    assert of(cores(0.6, 0.6, run_cores=1.2), communication=2.0) == "communication 40 %"


def test_where_exchanges_are_within_other_parts_it_is_said() -> None:
    found = told(COMPUTING, strategy="zero3")
    assert found.words == "compute or communication" and "zero3" in found.advice
    assert told({**COMPUTING, "communication": 2.0}, strategy="1f1b").words == (
        "waits for stages 40 %"
    )


def test_the_advice_has_the_mfu_where_there_is_one() -> None:
    assert "MFU of 41.0 %" in told(COMPUTING, mfu=0.41).advice
    assert "MFU" not in told(COMPUTING).advice


def test_nothing_is_said_where_parts_are_not_told_apart() -> None:
    for parts, device in ((COMPUTING, "mps"), ({}, "cpu")):
        assert (
            bottleneck(
                BottleneckInputs(
                    TimeParts(**{f"{k}_s": v for k, v in parts.items()}), device, "single", 1
                )
            )
            is None
        )
