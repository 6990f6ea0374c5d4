// What the recorder of a profiled step works on beside tape.h: the classes of what is written down, and the
// meter of main memory.
#pragma once

#include <time.h>

#include <vector>

#include "governor.h"

namespace lowtide {

struct Traced {  // the classes of what is written down, and slots of lowtide.trace.tracer.Tracer
  struct OfTracer {
    py::object type;
    Slot in_forward{type, "in_forward"}, closed{type, "closed"}, opaque{type, "opaque"},
        left_bytes{type, "left_bytes"}, known{type, "known"}, handed_out{type, "handed_out"},
        scopes{type, "scopes"}, modules{type, "modules"}, backward_module{type, "backward_module"},
        files{type, "files"}, operations{type, "operations"}, storages{type, "storages"},
        values{type, "values"}, events{type, "events"}, signatures{type, "signatures"};
  } tracer;
  struct OfReference {  // to a storage
    py::object type;
    Slot key{type, "key"}, number{type, "number"}, value{type, "value"}, phase{type, "phase"},
        resized{type, "resized"}, gathered{type, "gathered"};
  } reference;
  struct OfStorage {
    py::object type;
    Slot id{type, "id"}, bytes{type, "bytes"}, kind{type, "kind"}, producer{type, "producer"},
        name{type, "name"};
  } storage;
  struct OfVersion {
    py::object type;
    Slot storage{type, "storage"}, version{type, "version"}, producer{type, "producer"},
        shape{type, "shape"}, dtype{type, "dtype"};
  } version;
  struct OfOperation {
    py::object type;
    Slot name{type, "name"}, reads{type, "reads"}, writes{type, "writes"}, phase{type, "phase"},
        module{type, "module"}, random{type, "random"}, reason{type, "reason"}, source{type, "source"},
        region{type, "region"};
  } operation;
  struct OfCost {  // of a form: its measured runs
    py::object type;
    Slot warm{type, "warm"}, cold{type, "cold"}, scratch{type, "scratch_bytes"},
        reproduced{type, "reproduced"};
  } cost;
  py::object calling_line;
  std::vector<std::string> says_where, writes_part;  // tables of lowtide.ops
  py::object outside;  // why an operation is not replayable that is not the forward's
  py::str op{"op"}, nothing{""}, forward{"forward"}, backward{"backward"};
};
inline Traced* traced = nullptr;  // set once per process

// What a call takes, as lowtide.trace.clock.Clock and lowtide.meter say it of main memory.
class Measured {
 public:
  explicit Measured(const Meter& meter) : meter_(meter), mark_(meter.open ? meter.open() : -1) {}
  Measured(const Measured&) = delete;
  ~Measured() {
    if (mark_ >= 0) meter_.close(mark_);
  }

  double seconds() const { return now() - begin_; }
  int64_t scratch_bytes() const {
    return mark_ < 0 ? 0 : meter_.peak(mark_) - std::max<int64_t>(0, meter_.live(mark_));
  }

 private:
  static double now() {
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  }

  const Meter& meter_;
  int mark_;
  double begin_ = now();
};

}  // namespace lowtide
