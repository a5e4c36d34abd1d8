"""What reads bytes of others, each as a target that bytes can be thrown at: ``tests.security.test_fuzzing`` does so for
a moment, ``make fuzz`` for as long as it is told.
"""
