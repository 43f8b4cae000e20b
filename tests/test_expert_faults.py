"""Faults that other systems had in layers of experts, silently: `verify()` finds those of `expert_faults.yaml`, in
plans, rules and algorithms; each of the others, in counters, hooks, data and what all ranks share, has another test.
"""

import pytest
from support.launch import ROOT
from support.nightly import daily
from test_sequence_faults import check_tests
from verify_faults import SUBJECTS, outcome, read_faults

FAULTS = read_faults("expert_faults.yaml")
THREADS = {  # threads of other projects, and the fault -> files and tests, or `expert_faults.yaml` and names
    "torchtitan #4054: gradients below the experts are too small": (
        "expert_faults.yaml", "tokens-without-a-gradient",
        "expert_faults.yaml", "below-the-experts-terms-of-one-rank"),
    "torchtitan #2416, transformers #48205, #48687, Automodel #2995: the router's gradient is partial, or detached": (
        "expert_faults.yaml", "weights-without-a-gradient",
        "expert_faults.yaml", "below-the-experts-terms-of-one-rank"),
    "torchtitan #3604, #3664: results in the wrong rows of a batch of several": (
        "expert_faults.yaml", "results-in-other-rows",
        "expert_faults.yaml", "results-of-another-row-of-the-batch"),
    "torchtitan #4245, Automodel #2591, Megatron #5850: a bias of each rank, or of each choice": (
        "expert_faults.yaml", "bias-of-every-rank", "expert_faults.yaml", "choices-are-not-weighted",
        "test_experts.py", "test_one_card"),
    "torchtitan #4154, #3686, #3666, Megatron #6114: counts aren't of all tokens, or are counted again": (
        "expert_faults.yaml", "losses-of-the-router-are-of-each-rank",
        "expert_faults.yaml", "recomputed-from-other-choices",
        "test_experts.py", "test_choices_are_not_made_again",
        "test_routed_recipes.py", "test_empty_rows_count_nowhere"),
    "Megatron #5047, #5798, #3199, Automodel #3359: gradients of aux and z losses times ranks": (
        "expert_faults.yaml", "means-are-sums", "expert_faults.yaml", "product-of-two-shares",
        "test_experts.py", "test_training"),
    "Megatron #5916, #6080, #6099, #3024, #3746: norms omit experts, or count them twice": (
        "expert_faults.yaml", "norm-forgets-experts", "expert_faults.yaml", "norm-counts-experts-twice"),
    "Automodel #3135: copies of experts aren't synchronised": (
        "expert_faults.yaml", "copies-of-experts-part", "test_experts.py", "test_training",
        "verify_faults.yaml", "initial-values-by-local-size"),
    "Automodel #2995: experts without tokens aren't decayed": (
        "expert_faults.yaml", "idle-experts-without-decay", "test_experts.py", "test_training"),
    "DeepSpeed #8195: another dim is cut, which also fits": (
        "expert_faults.yaml", "rows-of-the-wrong-dim", "test_experts.py", "test_each_cut"),
    "Automodel #2682: experts that files don't give": (
        "test_checkpoint_hugging_face.py", "test_other_tensors_are_errors"),
    "DeepSpeed #8261, torchtitan #3969: offsets of elements in int32": (
        "test_expert_rows.py", "test_rows_are_numbered"),
    "HyperParallel #77: twice the norm under tensor parallelism": (
        "expert_faults.yaml", "bias-of-every-rank", "expert_faults.yaml", "norm-counts-experts-twice"),
    "torchtitan #3174, #3412: tied weights are summed twice; a partial loss is marked as replicated": (
        "verify_faults.yaml", "tied-norm-counted-twice", "verify_faults.yaml", "mark-lost-in-the-plan"),
    "rows behind those that are filled are sent, or a step is compiled for each load": (
        "ranks/case_experts.py", "case_balanced_choices_send_as_many_bytes_as_the_formula_says",
        "expert_faults.yaml", "rows-for-the-first-expert-stay",
        "expert_faults.yaml", "as-many-rows-back-as-there", "test_experts.py", "test_one_card"),
}  # fmt: skip


@pytest.mark.parametrize("thread", THREADS)
def test_each_fault_has_its_tests(thread):
    check_tests(THREADS[thread])


@pytest.mark.parametrize("fault", daily(FAULTS[:1], FAULTS), ids=lambda fault: fault.name)
def test_a_fault_is_found_in_its_place(fault):
    report = outcome(fault.subject, fault)
    assert report, "not found"
    assert not [words for words in fault.report if words not in report], report


def test_faults_fit_the_code():
    assert len(FAULTS) >= 30 and len({fault.name for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        assert fault.planted((ROOT / "mindformers_core" / fault.file).read_text())
        assert fault.subject in SUBJECTS and fault.report
