"""What Horovod does with our messages, by its own timeline."""

import json
from pathlib import Path

import pytest
from harness.launch import launch

WORKER = Path(__file__).parent / "scripts" / "timeline.py"


def activities(path):
    """Names of what Horovod did to our messages, one for each time: (message, activity)."""
    events = json.loads(path.read_text())
    names = {
        event["pid"]: event["args"]["name"]
        for event in events
        if event.get("name") == "process_name" and "name" in event["args"]
    }
    return [
        (names[event["pid"]], event["name"])
        for event in events
        if event["ph"] == "B" and names.get(event["pid"], "").startswith("poseidon.")
    ]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "method, fused", [("horovod", True), ("wfbp", False), ("lazy:20000", False), ("priority:4000", False)]
)
def test_messages_are_put_together_by_method_horovod_alone(tmp_path, method, fused):
    path = tmp_path / "timeline.json"
    launch(2, [str(WORKER), method], seconds=100, env={"HOROVOD_TIMELINE": str(path)}).expect_success()
    seen = activities(path)
    assert any(activity == "ALLREDUCE" for _, activity in seen)
    copied = {message for message, activity in seen if activity.startswith("MEMCPY")}
    assert bool(copied) == fused, copied
