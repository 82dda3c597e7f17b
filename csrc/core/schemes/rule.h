// What selector, step model and planner know of a scheme. One file per scheme implements it, one line of registry.cc
// names it. Pure and immutable, any thread.
#pragma once

#include <string>

#include "core/model/work.h"
#include "core/plan/profile.h"
#include "core/schemes/codec.h"

namespace poseidon {

// Under which a tensor travels.
struct Setting {
  int size = 1;     // ranks of the process set
  WireFormat wire;  // of gradients and factors
};

class SchemeRule {
 public:
  virtual ~SchemeRule() = default;

  // Its id between ranks and in Python. Lower case, no spaces.
  virtual const char* name() const = 0;
  // A lossy scheme is never chosen unless the user asked for it.
  virtual bool lossy() const { return false; }
  // A plain scheme is what the transport does by itself. One of them is possible for every tensor, and is used where
  // nothing else is possible or better.
  virtual bool plain() const { return false; }
  virtual bool can_be_asked_for() const { return true; }

  // Whether it is made for this kind of tensor. One that is not makes no offer, and what the user asked of it is
  // refused with Obstacle().
  virtual bool Concerns(const MergedTensor&) const { return true; }
  // Why it cannot carry this tensor; empty if it can.
  virtual std::string Obstacle(const MergedTensor& tensor, const Setting& setting) const = 0;
  // That policy kSfb promises this scheme for this tensor: the user is warned of an obstacle.
  virtual bool Promised(const MergedTensor&) const { return false; }
  // Whether the profiled step tells enough to compare it with others.
  virtual bool Measured(const MergedTensor&) const { return true; }

  // What there is to do for one step, if there is no obstacle. `covers` is left empty.
  virtual Work WorkOf(const MergedTensor& tensor, const LayerCost& cost, const Setting& setting) const = 0;
  // Whether the bias of the tensor's layer travels along.
  virtual bool CoversBias() const { return false; }

  // The reason of a choice by bytes, for the report. otherwise: bytes that a rank sends with the plain scheme.
  virtual std::string ReasonByBytes(const MergedTensor& tensor, const Setting& setting, double otherwise) const;
};

}  // namespace poseidon
