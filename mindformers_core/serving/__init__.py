"""Generation with what was trained: tokens of prompts, the choice of the next token, and the loop over both."""
