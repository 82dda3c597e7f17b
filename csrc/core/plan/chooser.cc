#include "core/plan/chooser.h"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <string>
#include <utility>

#include "core/plan/dense_choice.h"
#include "core/plan/selector.h"
#include "core/plan/time_choice.h"

namespace poseidon {
namespace {

std::string MillisecondsText(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g ms", seconds * 1e3);
  return text;
}

// One plan in the making.
class Chooser {
 public:
  Chooser(const Question& question, const ChooserSettings& settings, Trials* trials, const Tuning& tuning)
      : question_(question), settings_(settings), trials_(*trials), tuning_(tuning) {}

  Plan Make() {
    plan_.size = settings_.setting.size;
    plan_.made_at_step = question_.step;
    plan_.reconstruct_threads = question_.reconstruct_threads;
    plan_.dense_method = settings_.dense.method;
    const bool by_time =
        GoesByTime(settings_.policy, settings_.dense.method) && question_.measured.network.known() && plan_.size > 1;
    offers_ =
        OffersOf(question_.profile, by_time ? question_.measured.costs : std::vector<LayerCost>{}, settings_.setting);
    ByRules();
    if (by_time) {
      plan_.network = question_.measured.network;
      MakeModel();
      ByTime();
    }
    Keep();
    ByLayout(by_time);
    return std::move(plan_);
  }

 private:
  size_t count() const { return question_.profile.tensors.size(); }
  SchemeOverride Wish(size_t i) const {
    return i < settings_.wishes.size() ? settings_.wishes[i] : SchemeOverride::kAuto;
  }
  const TensorDecision* Kept(size_t i) const { return i < question_.kept.size() ? question_.kept[i] : nullptr; }

  void ByRules() {
    for (size_t i = 0; i < count(); ++i) {
      plan_.decisions.push_back(
          DecideByRules(question_.profile.tensors[i], Wish(i), settings_.policy, settings_.setting, offers_[i]));
    }
  }

  // The network as slow as it must have been in the steps that were observed; the layout in force.
  void MakeModel() {
    offered_ =
        MakeStepModel(question_.profile, offers_, question_.measured, settings_.setting.wire.traits.fusion_bytes);
    for (size_t i = 0; i < count(); ++i) {  // nobody used it: no rows travel
      if (Kept(i) == nullptr || offered_.IndexOf(i, Kept(i)->scheme) >= 0) continue;
      Work nothing;
      nothing.collective = Collective::kAllgather;
      offered_.model.tensors[i].offers.push_back(nothing);
      offered_.schemes[i].push_back(Kept(i)->scheme);
    }
    if (!trials_.slices().empty()) ApplyLayout(trials_.slices(), &offered_.model);
    if (trials_.current().size() == count() && question_.profile.step_seconds > 0) {
      trials_.load = LoadOf(offered_.model, offered_.ChoiceOf(trials_.current()), question_.profile.step_seconds,
                            trials_.load, tuning_);
    }
    plan_.prediction.load = trials_.load;
    loaded_ = UnderLoad(offered_.model, trials_.load);
  }

  // What tensor i may take: what the rules say, unless it goes by time; then the plain offer, and all that is measured
  // and loses nothing.
  std::vector<int> AllowedFor(size_t i) const {
    if (Kept(i) != nullptr) return {offered_.IndexOf(i, Kept(i)->scheme)};
    const MergedTensor& tensor = question_.profile.tensors[i];
    const bool free = settings_.policy == Policy::kTime && Wish(i).is_auto() && !tensor.sparse;
    if (!free) return {offered_.IndexOf(i, plan_.decisions[i].scheme)};
    std::vector<int> allowed = {0};
    for (size_t offer = 1; offer < offered_.schemes[i].size(); ++offer) {
      const SchemeRule& rule = RuleOf(offered_.schemes[i][offer]);
      if (!rule.lossy() && rule.Measured(tensor)) allowed.push_back(static_cast<int>(offer));
    }
    return allowed;
  }

  // A choice of earlier steps in terms of today's offers. A bias follows its layer's weight and has no choice of its
  // own: as a tensor of its own it is allreduced here.
  Choice Translated(const std::vector<Scheme>& schemes, const Allowed& allowed) const {
    if (schemes.size() != count()) return {};
    Choice choice;
    for (size_t i = 0; i < count(); ++i) {
      const bool allreduced = allowed[i] == std::vector<int>{0} && offered_.schemes[i][0] == Scheme::kAllreduce;
      choice.push_back(allreduced ? 0 : offered_.IndexOf(i, schemes[i]));
    }
    return choice;
  }

  void ByTime() {
    Allowed allowed;
    for (size_t i = 0; i < count(); ++i) {
      Price(i);
      allowed.push_back(AllowedFor(i));
    }
    past_.current = Translated(trials_.current(), allowed);
    for (const Tried& each : trials_.tried()) {
      past_.tried.push_back({Translated(each.schemes, allowed), each.seconds, each.total, each.steps});
    }
    if (question_.profile.first_step_seconds > 0) past_.plain_at_most = question_.profile.first_step_seconds;
    by_time_ = ChooseByTime(loaded_, allowed, settings_.gather_memory_bytes, past_, tuning_);
    for (size_t i = 0; i < count(); ++i) {
      if (allowed[i].size() > 1) Explain(i, allowed[i]);
    }
  }

  // The seconds of tensor i's offers. A sparse gradient is never reduced as a dense one.
  void Price(size_t i) {
    for (Offer& offer : plan_.decisions[i].offers) {
      const int index = offered_.IndexOf(i, offer.scheme);
      if (index >= 0) offer.seconds = SecondsAlone(loaded_, loaded_.tensors[i].offers[index]);
    }
  }

  void Explain(size_t i, const std::vector<int>& allowed) {
    TensorDecision& decision = plan_.decisions[i];
    const std::vector<Work>& offers = loaded_.tensors[i].offers;
    const int chosen = by_time_.choice[i];
    decision.scheme = offered_.schemes[i][chosen];
    int other = chosen;  // the one that is compared with the plain one
    for (int offer : allowed) {
      const bool better = other == 0 || SecondsAlone(loaded_, offers[offer]) < SecondsAlone(loaded_, offers[other]);
      if (chosen == 0 && offer != 0 && better) other = offer;
    }
    const double plain = SecondsAlone(loaded_, offers[0]), seconds = SecondsAlone(loaded_, offers[other]);
    const std::string alone = MillisecondsText(seconds) + " against " + MillisecondsText(plain);
    if (by_time_.over_memory[i]) {
      decision.reason = "time: its gathered rows exceed the memory limit";
    } else if ((chosen != 0) == (seconds < plain)) {
      decision.reason = "time: " + alone;
    } else {
      decision.reason =
          "time: " + alone + " alone, " + (chosen != 0 ? "but it shortens the step" : "but hidden or too small a gain");
    }
  }

  void Keep() {
    for (size_t i = 0; i < count(); ++i) {
      if (Kept(i) != nullptr) plan_.decisions[i] = *Kept(i);
    }
  }

  void ByLayout(bool by_time) {
    if (settings_.setting.size <= 1) return;
    const std::vector<DenseTensor> tensors = TensorsToSlice(question_, plan_.decisions, offers_);
    if (!by_time) {
      plan_.slices = LayOut(settings_.dense, tensors, AlphaBeta{});
      return;
    }
    LayoutQuestion question;
    question.tensors = tensors;
    question.idle = &offered_.model;
    question.loaded = &loaded_;
    question.choice = &by_time_.choice;
    question.in_force = trials_.slices();
    question.given = question_.measured.network_given;
    plan_.slices = ChooseLayout(question, settings_.dense, tuning_);
    Predict();
  }

  // Of the whole plan. Everything plain goes as slices in force say, which nobody would choose for it.
  void Predict() {
    StepModel chosen = loaded_;
    if (settings_.dense.method != DenseMethod::kFused) ApplyLayout(plan_.slices, &chosen);
    StepPrediction& prediction = plan_.prediction;
    prediction.known = true;
    prediction.chosen = SimulateStep(chosen, by_time_.choice);
    prediction.dense = SimulateStep(loaded_, by_time_.plain);
    prediction.chosen.step += Unexplained(by_time_.choice);
    prediction.dense.step += Unexplained(by_time_.plain);
    for (StepEstimate* estimate : {&prediction.chosen, &prediction.dense}) {
      estimate->step += question_.update_seconds;
      estimate->compute += question_.update_seconds;
    }
  }

  // What the model does not explain of a step that was observed: ranks that wait for each other, above all. Of a choice
  // that was not tried nothing better is known than that of the one in force.
  double Unexplained(const Choice& choice) const {
    for (const Choice* each : {&choice, static_cast<const Choice*>(&past_.current)}) {
      for (const TriedChoice& tried : past_.tried) {
        if (!each->empty() && tried.choice == *each)
          return std::max(0.0, tried.seconds - SimulateStep(loaded_, *each).step);
      }
    }
    return 0;
  }

  const Question& question_;
  const ChooserSettings& settings_;
  Trials& trials_;
  const Tuning& tuning_;
  std::vector<std::vector<PricedOffer>> offers_;
  OfferedModel offered_;  // the network idle
  StepModel loaded_;
  Past past_;
  TimeChoice by_time_;
  Plan plan_;
};

}  // namespace

bool GoesByTime(Policy policy, DenseMethod dense) {
  return policy == Policy::kTime || dense == DenseMethod::kAuto || dense == DenseMethod::kMerged ||
         dense == DenseMethod::kPriority;
}

Plan Choose(const Question& question, const ChooserSettings& settings, Trials* trials, const Tuning& tuning) {
  return Chooser(question, settings, trials, tuning).Make();
}

}  // namespace poseidon
