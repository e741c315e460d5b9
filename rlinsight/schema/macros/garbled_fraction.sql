-- Share of a text's characters no reader can use: control characters but tab and line breaks, replacement characters (bytes that
-- are no text), and private ones. NULL for no text, 0 for an empty one.
-- Example: SELECT rollout_id, garbled_fraction(response_text) FROM token_runs WHERE step = 1;
CREATE OR REPLACE MACRO garbled_fraction(words) AS
  CASE WHEN words IS NULL THEN NULL
    -- Nearly every text has none, and to see that takes a fifteenth of counting them.
    WHEN NOT regexp_matches(words, '[\x00-\x08\x0B\x0C\x0E-\x1F\x7F-\x{9F}\x{FFFD}\p{Co}]') THEN 0
    ELSE length(regexp_replace(words, '[^\x00-\x08\x0B\x0C\x0E-\x1F\x7F-\x{9F}\x{FFFD}\p{Co}]', '', 'g')) / length(words)
  END;
