"""Faults that other systems had where ranks share sequences, silently, and which tests of ours would find each."""

import re

import pytest
from support.launch import ROOT

TESTS = ROOT / "tests"
FAULTS = {  # threads of other projects, and the fault -> files and tests, or `verify_faults.yaml` and names
    "torchtitan #3206, #3681: heads are gathered in the place of tokens": (
        "verify_faults.yaml", "heads-in-the-place-of-tokens", "test_cut_attention.py", "test_each_algorithm"),
    "HyperParallel #244: an exchange over a dim that happens to divide; a whole sequence on each rank": (
        "test_sequence_programs.py", "test_heads_that_ranks_do_not_divide",
        "test_exchanged_heads.py", "test_heads_that_the_axis_does_not_divide",
        "test_balance.py", "test_data_that_have_no_order_of_tokens"),
    "torchtitan #2780, #3257: positions of packing are lost; evaluation has another mask": (
        "test_balance.py", "test_training_and_evaluation_of_documents"),
    "torchtitan #2990: tokens are counted on each rank that shares them": (
        "test_balance.py", "test_training_and_evaluation_of_documents",
        "ranks/case_training.py", "compare_with_one_rank"),
    "torchtitan #3280: the loss of tp 2 x cp 2 is half that of either alone": (
        "test_sequence_programs.py", "test_a_step_on_all_ranks",
        "ranks/case_training.py", "case_eager_training_equals_one_rank"),
    "torchtitan #2206, #4167, #4194: a mean of means": (
        "test_label_weights.py", "test_every_label_weighs_alike",
        "test_sequence_programs.py", "test_the_loss_of_a_token_at_every_border"),
    "torchtitan #4075, ChatLearn #343, verl #4250: labels are shifted after the cut, or across documents": (
        "test_balance.py", "test_labels_positions_and_places_travel_with_their_tokens",
        "test_sequence_programs.py", "test_the_loss_of_a_token_at_every_border"),
    "Megatron #5243, NeMo RL #4070, ms-swift #9904: a document of one token is part of the next one": (
        "test_balance.py", "test_a_token_has_the_logits_of_its_place"),
    "Automodel #2931, #3414, #3540: a rank whose tokens have no part in the loss, with accumulation": (
        "test_label_weights.py", "test_every_label_weighs_alike"),
    "miles #2215: labels of further predictions are shifted twice": (
        "test_sequence_programs.py", "test_what_a_model_shifts_crosses_ranks",
        "test_prediction_heads.py", "test_a_step_on_all_ranks"),
    "Megatron #3575: fewer heads of keys and values than ranks": (
        "test_sequence_programs.py", "test_few_heads_of_keys_and_values",
        "ranks/case_training.py", "case_compiled_context_parallel_training_by_all_to_all_equals_one_rank"),
    "MaxText 01c69f4: the position in the data goes through the order of tokens": (
        "ranks/case_checkpoint.py", "case_resumed_run_with_few_checkpoints"),
    "Megatron #1464, TransformerEngine #1557: gradients of keys and values of the wrong rank": (
        "verify_faults.yaml", "gradients-go-on-in-the-ring",
        "verify_faults.yaml", "gathered-gradients-of-another-rank"),
    "sums of softmax are merged in low precision, or not at all": (
        "verify_faults.yaml", "sums-of-the-last-part", "test_cut_attention.py", "test_halves_against_one_card"),
}  # fmt: skip


def check_tests(given):
    """Each pair of a file and a name is that of a test, or of a planted fault."""
    for file, name in zip(given[::2], given[1::2], strict=True):
        assert re.search(rf"^(def |- name: ){re.escape(name)}\b", (TESTS / file).read_text(), re.MULTILINE), name


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_has_its_tests(fault):
    check_tests(FAULTS[fault])
