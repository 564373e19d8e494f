"""What runs inside a cell: one folder per question. Declarations import no torch; `work` modules do."""
