"""As many images are decoded at a time as there are processors."""

import threading

from datapipe.packing.budget import Budget
from tests.waiting import limit_s, wait_until


def test_one_image_more_waits_for_a_processor():
    budget, claims = Budget(total_bytes=1000, processors=2), []
    threads = [threading.Thread(target=lambda: claims.append(budget.claim(1, lambda: False))) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(claims) + len(budget._waiting) == 3)
    assert len(claims) == 2
    budget.release(1)
    for thread in threads:
        thread.join(limit_s())
    assert claims == [True] * 3
