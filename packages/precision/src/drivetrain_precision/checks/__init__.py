"""Operations in half precision: autocast's rules, a record of a run, and misuse in user code."""
