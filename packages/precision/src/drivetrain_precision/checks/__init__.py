"""Operations in half precision: autocast's rules, a record of a run, and faults in user code."""
