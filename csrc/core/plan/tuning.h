// Every tuned constant of the decision. What the user may set is not here (ChooserSettings), nor what bounds numbers
// from outside (bounds.h).
#pragma once

#include <cstddef>
#include <cstdint>

namespace poseidon {

struct Tuning {
  // ---- The objective (objective.h)

  // Share. Seconds of the network and of the rebuilding thread count so much of a second of the step: of two choices
  // that hide all communication, the one with less work wins.
  double busy_weight = 0.01;
  // Share of the time from the first complete gradient to the step's end. A change must gain so much: predictions and
  // steps vary by about that.
  double margin = 0.02;

  // ---- The search (search.h)

  // Passes over all tensors. Each ends sooner if nothing changes; more have not been seen to help.
  int most_sweeps = 12;
  // Tensors. Up to so many, every pair is tried together; beyond, only neighbours, since pairs grow as the square.
  size_t most_for_all_pairs = 32;
  // Tensors. How far apart the two of a pair may then be in the order of parameters.
  size_t pair_distance = 6;

  // ---- Measured against predicted (verdict.h)

  // Share of an observed step. A model that explains less is not believed.
  double least_explained = 0.5;
  // Seconds and steps. Short steps vary: a choice that has been in force for less says little.
  double look_seconds = 0.3;
  int64_t look_steps = 3;
  // Times the fastest. What took less may be as good as the fastest.
  double near = 1.5;
  // Seconds. A step so short costs next to nothing to try.
  double short_step = 0.04;
  // Choices. So many are tried although something else is predicted to be better.
  size_t most_tried = 4;

  // ---- Memory of earlier steps (trials.h)

  // Seconds. A choice's earlier steps weigh at most so much against those seen last: machines change.
  double remembered_seconds = 1;

  // ---- The network within a step (network_load.h)

  // Share of the step. What the network changes below it is lost in the noise of everything else.
  double least_share = 0.1;

  // ---- The layout of allreduces (dense_layout.h, dense_choice.h)

  // Times alpha. While ranks compute, and other threads find no core free, each hop of a message and of the negotiation
  // before it waits for one. On 4 ranks with 2 cores the negotiation alone took 25 to 75 ms, and a message of 1 MB
  // 150 ms longer than between idle ranks, where the trials before found an alpha of 2 to 9 ms.
  double busy_alpha = 15;
  // Bytes. Thetas that `auto` chooses from: below the first a message is mostly latency, beyond the last all is one.
  double first_theta = 64 << 10;
  double last_theta = 64 << 20;
  double theta_growth = 4;

  // ---- When a plan is looked at again (schedule.h)

  // Steps: after which a plan is looked at first, and at most so many between two looks.
  int64_t first_revision = 3;
  int64_t most_steps_between_plans = 64;
  // Steps after which a choice that took another's place is compared with it.
  int64_t steps_of_trial = 4;
  // Times the rows that the plan expects, and steps in a row. A short last batch of an epoch changes nothing.
  double rows_factor = 2;
  int steps_of_other_rows = 4;
};

inline constexpr Tuning kTuning{};

}  // namespace poseidon
