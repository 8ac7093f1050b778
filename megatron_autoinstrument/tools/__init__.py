"""For people: reads what was recorded. A rank never imports it."""
