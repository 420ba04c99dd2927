"""What is measured with other settings stands beside what was measured before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import verifier_gpu


def test_settings_stand_beside_each_other_and_the_fastest_counts(tmp_path: Path) -> None:
    def add(variant: str, value: float, device: str = "a card") -> dict[str, Any]:
        facts = {"command": variant, "commit": "0123456", "value": value, "against": 40.0, "ratio": value / 40}
        verifier_gpu.add(facts | {"repetitions": {}}, variant, tmp_path, device, tmp_path / "log")
        found: dict[str, Any] = json.loads((tmp_path / "verifier_gpu.json").read_text())
        return found

    add("compiled", 200.0)
    facts = add("as the engines", 150.0)
    assert facts["variants"].keys() == {"compiled", "as the engines"}
    assert (facts["fastest"], facts["value"], facts["command"]) == ("compiled", 200.0, "compiled")
    assert facts["commit"] == "0123456"  # at which the fastest was measured
    assert add("as the engines", 90.0, "another card")["variants"].keys() == {"as the engines"}


def test_the_measured_baseline_is_one_of_the_variants() -> None:
    facts = json.loads((verifier_gpu.baseline.FOLDER / "verifier_gpu.json").read_text())
    assert facts["value"] == facts["variants"][facts["fastest"]]["value"]
