"""Performance targets of the package, and whether this machine's figures meet them: one row per target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Figures = dict[str, Any]

TARGET_GFLOPS, TARGET_CORES = 140, 2  # machine to which the criterion's target of 4 CPU seconds applies


@dataclass(frozen=True)
class Verdict:
    """A target and its measurement; ``is_met`` is None if there is no target or nothing could be measured."""

    what: str
    measured: str
    target: str
    is_met: bool | None


def verdicts(figures: dict[str, Figures]) -> list[Verdict]:
    """Verdicts on all measured parts."""
    return [verdict for name, judge in JUDGES.items() if name in figures for verdict in judge(figures[name])]


def of_criterion(found: Figures) -> list[Verdict]:
    """Time, gradients and memory of the criterion."""
    machine, ours = found["machine"], found["ours"]
    factor = TARGET_GFLOPS / TARGET_CORES / machine["gemm_gflops_per_cpu_second"]
    cpu, here = ours["cpu"]["median"], 4 * factor
    size = f"{ours['images']} x {ours['proposals']:,} proposals, {ours['classes']} classes, {ours['rows']:,} rows"
    rows = [
        Verdict(
            f"criterion, forward + backward ({size})",
            f"{cpu:.2f} CPU s",
            f"4 CPU s at {TARGET_GFLOPS} GFLOPS on {TARGET_CORES} cores; this machine's GEMM runs at "
            f"{machine['gemm_gflops_per_cpu_second']:.0f} per core, so {here:.1f} CPU s here",
            cpu <= here,
        ),
        Verdict("criterion: peak memory", f"{ours['peak_mb']:.0f} MB", "256 MB", ours["peak_mb"] <= 256),
    ]
    if "relative_difference" in found:
        apart, twin = found["relative_difference"], found["twin"]["cpu"]["min"]
        measured = f"relative difference {apart:.0e}; the loops take {twin:,.1f} CPU s"
        what = "criterion: gradients against the reference written with loops"
        rows.insert(1, Verdict(what, measured, "1e-4", apart <= 1e-4))
    return rows


def of_kernels(found: Figures) -> list[Verdict]:
    """Wall time of RoIPool and NMS."""
    rows = {row["name"]: row for row in found["rows"]}
    pool, nms = rows["RoIPool forward + backward"], rows["NMS at 0.4"]
    pooled, kept = pool["ours"]["wall"]["median"], nms["ours"]["wall"]["median"]
    return [
        Verdict(
            f"RoIPool 7 x 7, forward + backward ({pool['rois']:,} RoIs, {pool['channels']} channels)",
            f"{pooled:.3f} s, {'equal' if pool['equal_to_plain_torch'] else 'not equal'} to plain torch",
            "0.4 s on 2 cores, equal",
            pooled <= 0.4 and pool["equal_to_plain_torch"],
        ),
        Verdict(
            f"NMS ({nms['classes']} classes x {nms['boxes_each']:,} boxes, IoU 0.4)",
            f"{kept:.3f} s, {'same' if nms['same_kept'] else 'different'} boxes kept",
            "0.098 s (torchvision on another machine), same boxes kept",
            kept <= 0.098 and nms["same_kept"],
        ),
    ]


def of_steps(found: Figures) -> list[Verdict]:
    """Memory, gradients and time of the exact step."""
    fitting = [row for row in found["rows"] if row.get("fits", True)]
    largest = max((row["images"] for row in found["rows"]), default=0)
    exact = [row for row in fitting if row["memory"] == "exact"]
    plain = [row for row in fitting if row["memory"] == "plain"]
    single = [row for row in plain if row["images"] == 1]
    rows = []
    if single and exact:
        ratio = exact[0]["peak_mb"] / single[0]["peak_mb"]
        peaks = f"{exact[0]['peak_mb'] / 1024:.2f} GB vs {single[0]['peak_mb'] / 1024:.2f} GB"
        what = f"exact step, {largest} photos: peak memory"
        rows.append(Verdict(what, f"{ratio:.2f} x ({peaks})", "1.3 x the plain step with 1 photo", ratio <= 1.3))
    pairs = [(e, p) for e in exact for p in plain if p["images"] == largest and e["proposals"] == p["proposals"]]
    for one, other in pairs[:1]:
        ratio = one["wall"]["median"] / other["wall"]["median"]
        seconds = f"{one['wall']['median']:.1f} s vs {other['wall']['median']:.1f} s"
        what = f"exact step, {largest} x {one['proposals']:,} proposals: time"
        rows.append(
            Verdict(what, f"{ratio:.2f} x ({seconds})", f"1.5 x the plain step with {largest} photos", ratio <= 1.5)
        )
    if found["relative_difference"] is not None:
        apart, size = found["relative_difference"], found["compared_at"]
        what = f"exact step, {size['images']} x {size['proposals']:,} proposals: gradients"
        rows.append(Verdict(what, f"relative difference {apart:.0e}", "1e-4 from the plain step", apart <= 1e-4))
    return rows


def of_processes(found: Figures) -> list[Verdict]:
    """Time and gradients of two processes."""
    count, each = len(found["two"]), found["images"] // len(found["two"])
    what = f"{count} processes x {each} photos vs 1 x {found['images']} ({found['proposals']:,} proposals each)"
    seconds = f"{max(r['wall']['median'] for r in found['two']):.1f} s vs {found['one']['wall']['median']:.1f} s"
    ratio, apart = found["time_ratio"], found["relative_difference"]
    return [
        Verdict(f"{what}: time on the same cores", f"{ratio:.2f} x ({seconds})", "1.15 x", ratio <= 1.15),
        Verdict(f"{what}: gradients, fp32", f"relative difference {apart:.0e}", "1e-5", apart <= 1e-5),
    ]


def of_precision(found: Figures) -> list[Verdict]:
    """bf16 compared with fp32, and the share of the machine's peak."""
    rows = {row["precision"]: row for row in found["rows"] if row.get("fits", True)}
    single, half = rows.get("fp32"), rows.get("bf16")
    if half is not None and single is not None:
        gain = single["wall"]["median"] / half["wall"]["median"]
        step = Verdict("bf16 step", f"{gain:.2f} x as fast as fp32", "2 x", gain >= 2)
        share = Verdict("whole step, bf16", _share(half), "40 % of the machine's peak", half["share_of_peak"] >= 0.4)
    else:
        tiny = found["bf16"]
        why = (
            f"not measured: the processor has no bf16 instructions (a 256 GEMM takes "
            f"{tiny['gemm_256_bf16_ms']:.2f} ms, in fp32 {tiny['gemm_256_fp32_ms']:.2f} ms)"
        )
        step = Verdict("bf16 step", why, "2 x as fast as fp32", None)
        share = Verdict("whole step, bf16", "not measured", "40 % of the machine's peak", None)
    whole = [Verdict("whole step, fp32", _share(single), "none (for reference)", None)] if single else []
    return [step, share, *whole]


def _share(row: Figures) -> str:
    peak = max(row["gemm_gflops"], row["convolution_gflops"])
    return f"{100 * row['share_of_peak']:.0f} % of the peak ({row['step_gflops']:.0f} of {peak:.0f} GFLOPS)"


def of_memory_growth(found: Figures) -> list[Verdict]:
    """Growth of memory and open files in a long run."""
    seen = found["verdict"]
    measured = (
        f"{seen['rss_mb_per_1000_steps']:+.2f} MB and {seen['files_per_1000_steps']:+.2f} open files "
        "per 1,000 steps after the warm-up"
    )
    target = "no growth (less than 5 MB, no open file)"
    return [Verdict(f"{found['steps']:,} steps of the tiny recipe", measured, target, seen["holds"])]


def of_ratios(found: Figures) -> list[Verdict]:
    """Ratios of two ways, alternating in one process."""
    return [_ratio(row["name"], row["times_as_fast"], row["target"]) for row in found["rows"]]


def of_coco_evaluation(found: Figures) -> list[Verdict]:
    """COCO evaluation against pycocotools, files included."""
    name = f"COCO evaluation, {found['images']:,} photos x {found['classes']} classes, against pycocotools"
    return [_ratio(name, found["times_as_fast_all"], 5.0)]


def _ratio(name: str, ratio: Figures, target: float) -> Verdict:
    measured = f"{ratio['median']:.2f} x as fast ({ratio['min']:.2f} to {ratio['max']:.2f})"
    return Verdict(name, measured, f"{target:g} x", ratio["median"] >= target)


JUDGES: dict[str, Callable[[Figures], list[Verdict]]] = {
    "kernels_against_history": of_ratios,
    "frozen_network": of_ratios,
    "coco_evaluation": of_coco_evaluation,
    "criterion": of_criterion,
    "kernels": of_kernels,
    "steps": of_steps,
    "processes": of_processes,
    "precision": of_precision,
    "memory_growth": of_memory_growth,
}
