"""Hand-made judgements: rows whose errors, ratios and verdicts are known by construction."""

from steptime.validation.judgement import Judgement
from steptime.validation.measurements import MeasuredRow

CELLS = {
    "model_name": "m",
    "n_layers": "32",
    "hidden": "4096",
    "ffn_hidden": "14336",
    "n_heads": "32",
    "gpu": "H100",
    "n_gpus": "64",
    "tp": "4",
    "pp": "2",
    "seq_len": "4096",
    "global_batch_size": "128",
    "micro_batch_size": "1",
    "precision": "bf16",
    "framework": "NeMo 24.07",
    "split": "test",
    "quality": "A",
    "source_group": "s",
}


def judged(name, measured=None, predicted=None, *, file="nvidia", verdict="fits", occupancy=None, more=None, **cells):
    """One judgement; `cells` are columns of its row, `more` fields of the judgement. Its config is its layout."""
    text = CELLS | {"id": name} | {key: str(value) for key, value in cells.items()}
    layout = {key: text.get(key, "1") for key in ("tp", "pp", "vpp", "micro_batch_size", "recompute")}
    made = Judgement(
        MeasuredRow(text, file, 2),
        accelerator="h100",
        precision="bf16",
        config={"parallelism": {}, "performance": {}, "layout": layout},
        measured_step_s=measured,
        predicted_step_s=predicted,
        verdict=verdict,
        occupancy=occupancy,
    )
    return made._replace(**(more or {}))
