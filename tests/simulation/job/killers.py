"""For each mutant of whole jobs, a seed that has killed it.

A change of the runtime sends the same seeds other ways, so the tests look here first, and then search. If that takes
long, put the numbers of ``python -m tests.simulation --mutants`` here, less one.
"""

KILLERS = {
    "lost-calls-never-end": 10,
    "lost-calls-said-not-to-have-run": 7,
    "lost-calls-made-again": 6,
    "late-requests-run": 120,
    "cancelled-requests-run": 0,
    "cancelled-requests-kept": 8,
    "cancelled-calls-never-end": 0,
    "lost-messages-forgotten": 1730,
    "deaths-kept-from-references": 2,
    "batches-sent-once": 17,
    "errors-kept-from-values": 234,
    "passes-wait-for-lost-messages": 1141,
    "contexts-of-the-dead-kept": 36,
    "ends-wait-for-a-request": 0,
    "failed-passes-kept": 769,
    "gradients-of-failed-passes-kept": 769,
    "returned-credit-lost": 3,
    "failures-not-reported-to-the-origin": 128,
    "newcomers-unknown": 0,
    "leavers-stay-listed": 70,
    "deaths-not-told": 11,
    "silence-taken-for-death": 139,
    "replacements-unnoticed": 41,
    "early-messages-forgotten": 4,
    "fingerprints-alike": 17,
    "own-calls-are-work": 13,
    "dead-holders-listed": 357,
    "dead-receivers-waited-for": 151,
    "accepted-is-gone": 30,
    "doubtful-ends-silently": 102,
}
