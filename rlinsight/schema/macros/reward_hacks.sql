-- Rollouts among the best 5 % that look bought: their text answers several different prompts (prompts_answered counts them), or says the
-- same thing over and over (repeated, of its last 2,000 characters). Texts of fewer than min_words words are left out: many prompts have the same short answer.
-- Example: FROM reward_hacks('my-run') WHERE prompts_answered >= 3 OR repeated > 0.5 LIMIT 20;
CREATE OR REPLACE MACRO reward_hacks(run, first_step := NULL, last_step := NULL, min_words := 6) AS TABLE
WITH scored AS (
  SELECT s.step, s.attempt, s.rollout_id, s.prompt_id, s.response_tokens, c.reward
  FROM rollout_samples s JOIN rollout_scores c ON c.run_id = s.run_id AND c.attempt = s.attempt AND c.rollout_id = s.rollout_id
  LEFT JOIN lineage l ON l.run_id = s.run_id AND l.attempt = s.attempt
  WHERE s.run_id = run AND (first_step IS NULL OR s.step >= first_step) AND (last_step IS NULL OR s.step <= last_step)
    AND (l.valid_through_step IS NULL OR s.step <= l.valid_through_step) AND coalesce(s.split, 'train') = 'train'
  QUALIFY row_number() OVER (PARTITION BY s.attempt, s.rollout_id ORDER BY c.time_ns DESC) = 1
), best AS (
  SELECT * FROM scored WHERE reward >= (SELECT quantile_cont(reward, 0.95) FROM scored)
), texts AS (
  SELECT attempt, rollout_id, string_agg(response_text, '' ORDER BY turn_index) AS response
  FROM token_runs WHERE run_id = run GROUP BY attempt, rollout_id
), counted AS (
  SELECT b.step, b.rollout_id, b.prompt_id, b.reward, b.response_tokens, t.response,
    hash(regexp_replace(lower(trim(t.response)), '\s+', ' ', 'g')) AS text_hash
  FROM best b JOIN texts t ON t.attempt = b.attempt AND t.rollout_id = b.rollout_id
  WHERE len(regexp_split_to_array(trim(t.response), '\s+')) >= min_words
)
SELECT step, rollout_id, prompt_id, reward, response_tokens, count(DISTINCT prompt_id) OVER (PARTITION BY text_hash) AS prompts_answered,
  repeated_fraction(right(response, 2000)) AS repeated, left(response, 120) AS response
FROM counted ORDER BY prompts_answered DESC, repeated DESC;
